"""Which rows are worked for under overload."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.engine.fair_shedding import MARGIN, RowWork, affordable, ranks
from tests.support.generated import examples

MS = 1_000_000


def work(slack_R: list[int], share_R: list[float], soft_R: list[bool] | None = None) -> RowWork:
    share = np.array(share_R, np.float64)
    soft = np.zeros(len(share), np.bool_) if soft_R is None else np.array(soft_R)
    return RowWork(np.array(slack_R), soft, share, 2 * share, 3 * share)


@st.composite
def rows(draw: st.DrawFn) -> tuple[RowWork, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    count = draw(st.sampled_from([1, 2, 7, 31, 32, 33, 100, 1000]))
    share_R = rng.choice([0.1, 1.0, 3.0], count) * MS
    slack_R = np.sort(rng.integers(0, int(share_R.sum() * draw(st.sampled_from([0.1, 0.5, 2.0]))) + 10 * MS, count))
    soft_R = rng.random(count) < draw(st.sampled_from([0.0, 0.2]))
    return RowWork(slack_R, soft_R, share_R, 1.5 * share_R, 2 * share_R), slack_R + 12345


@given(rows())
@settings(max_examples=examples(200), deadline=None)
def test_the_rows_that_are_kept_are_in_time_one_after_the_other(given_rows: tuple[RowWork, np.ndarray]) -> None:
    given_work, deadline_R = given_rows
    keep_R, spare_ns = affordable(given_work, deadline_R)
    if keep_R is None:
        return
    assert spare_ns < 0
    assert keep_R.any()
    assert keep_R[given_work.soft_R].all()
    kept_R = keep_R & ~given_work.soft_R
    until_R = MARGIN * np.where(kept_R, given_work.share_R, 0.0).cumsum()
    assert (until_R + given_work.batch_R - given_work.share_R <= given_work.slack_R + 1)[kept_R].all()


def test_all_are_kept_while_there_is_time_and_the_spare_time_is_what_may_pass() -> None:
    keep_R, spare_ns = affordable(work([10 * MS, 20 * MS], [MS, MS]), np.array([1, 2]))
    assert keep_R is None
    # The first row has 10 ms, and 2 ms alone.
    assert spare_ns == 8 * MS
    assert affordable(work([-MS], [MS], [True]), np.array([1])).keep_R is None


def test_a_part_of_every_length_is_kept() -> None:
    rng = np.random.default_rng(0)
    long_R = rng.random(800) < 0.2
    share_R = np.where(long_R, 1.0, 0.25) * MS
    deadline_R = np.sort(rng.integers(0, 120 * MS, 800)) + 10 * MS
    keep_R, _ = affordable(RowWork(deadline_R, np.zeros(800, np.bool_), share_R, share_R, share_R), deadline_R)
    assert keep_R is not None
    # 320 ms of work, 130 ms of time.
    kept = [keep_R[kind].mean() for kind in (long_R, ~long_R)]
    assert 0.2 < min(kept) <= max(kept) < 0.45
    assert min(kept) > 0.7 * max(kept)


def test_ranks_are_spread_evenly_and_do_not_follow_neighbours() -> None:
    rank_R = ranks(np.arange(10_000) + 10**18)
    assert abs(np.histogram(rank_R, 10, (0, 1))[0] - 1000).max() < 150
    assert abs(np.corrcoef(rank_R[:-1], rank_R[1:])[0, 1]) < 0.05
    assert np.array_equal(ranks(np.array([-5, 7])), ranks(np.array([-5, 7])))
