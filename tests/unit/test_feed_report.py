"""The sentence on what limits a training: nothing, decoding, or storage."""

import itertools
import time
from dataclasses import replace

import pytest

from penstock.train.data.loader import ReadingLoader
from penstock.train.data.sampler import training_order
from penstock.train.report.feed_report import FeedFigures, feed_figures
from penstock.train.report.throughput import WARM_UP_STEPS, WarmSteps
from tests.support.examples import Counted

FIGURES = FeedFigures(waited_share=0.3, waited_s=30, threads=3, read_per_s=410.2, steps_per_s=620, computing_share=0.95)


@pytest.mark.parametrize("change", [{"waited_share": 0.02}, {"waited_s": 1.9}])
def test_short_waits_are_not_worth_a_sentence(change: dict[str, float]) -> None:
    assert replace(FIGURES, **change).describe(8) is None  # pyright: ignore[reportArgumentType]


def test_decoding_and_storage_have_their_own_remedies() -> None:
    said = FIGURES.describe(8)
    assert said == (
        "30% of the time the steps waited for examples: 3 reading threads read 410 examples/s, and the steps take "
        "620/s. Decoding is the limit: give more workers (--workers; 8 cores can be used), or decode once "
        "('penstock shard')."
    )
    assert "use more cores, or decode once" in (FIGURES.describe(3) or "")
    slow = replace(FIGURES, computing_share=0.2).describe(8) or ""
    assert "Storage or busy cores are the limit (the threads waited for 80% of their time" in slow
    assert replace(FIGURES, read_per_s=None).describe(8) == "30% of the time the steps waited for examples."
    short = replace(FIGURES, steps_per_s=None).describe(8) or ""
    assert "3 reading threads read 410 examples/s. Decoding is the limit" in short
    assert "steps_per_s" not in replace(FIGURES, steps_per_s=None).fields()


@pytest.mark.parametrize(
    ("rates", "in_memory"), [((437_659, 90_000), True), ((437_659, 300_000), True), ((2_000, 600), False)]
)
def test_small_batches_are_no_fault_of_storage(rates: tuple[float, float], in_memory: bool) -> None:
    read_per_s, steps_per_s = rates
    figures = replace(FIGURES, threads=0, computing_share=0.5, read_per_s=read_per_s, steps_per_s=steps_per_s)
    said = figures.describe(8, in_memory=in_memory) or ""
    assert said.endswith("The overhead of each batch is the limit, not storage: larger batches (batch_size) help.")
    assert f"read {read_per_s:,} examples/s, and the steps take {steps_per_s:,}/s" in said


def test_the_rate_of_steps_is_that_of_warm_ones_without_waits_and_validations() -> None:
    warm = WarmSteps()
    # The first steps take 30 s, because they compile.
    warm.synchronized(1, 30.0, 0.1)
    assert warm.steps_per_s is None
    warm.synchronized(WARM_UP_STEPS, 31.0, 0.5)
    assert warm.steps_per_s is None
    warm.synchronized(WARM_UP_STEPS + 10, 34.0, 1.5)
    # A validation of 7 s.
    warm.leave_out(7.0)
    warm.synchronized(WARM_UP_STEPS + 20, 43.0, 1.5)
    assert (warm.steps, warm.seconds) == (20, pytest.approx(4.0))
    assert warm.steps_per_s == pytest.approx(5.0)


def test_waiting_threads_are_counted_as_such() -> None:
    examples = Counted(64, slow_s=0.02)
    started_s = time.monotonic()
    with ReadingLoader(examples, itertools.islice(training_order(0, 64, 16), 4), workers=2) as feed:
        assert len(list(feed)) == 4
    figures = feed_figures(feed, time.monotonic() - started_s, 320.0)
    assert figures.threads == 2
    assert feed.reading.examples == 64
    assert figures.computing_share is not None
    assert figures.computing_share < 0.6
    assert figures.read_per_s is not None
    assert figures.fields()["threads"] == 2
