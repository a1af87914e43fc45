"""The cores of the measurement of several front-ends, and the ratios that it refuses."""

from pathlib import Path

import pytest

from benchmarks.acceptance.server.frontend_scaling import (
    CoreSplit,
    Run,
    ScalingRuns,
    check_limit,
    described,
    one_thread_first,
    split_cores,
)
from penstock.core.errors import BenchError


def run(rate: float, *, frontend_idle: float = 0.0, sender_idle: float = 0.3) -> Run:
    """A run with a busy engine."""
    return Run(rate=rate, frontend_idle=frontend_idle, engine_idle=0.0, sender_idle=sender_idle)


def test_each_front_end_has_a_core_and_the_generator_the_rest() -> None:
    cores = split_cores(range(16), 8)
    assert cores == CoreSplit(frontends=tuple(range(8)), engine=8, senders=tuple(range(9, 16)))
    assert split_cores(range(64), 8).senders == tuple(range(9, 17))


def test_one_front_end_has_senders_in_proportion() -> None:
    cores = split_cores(range(16), 8)
    assert cores.first(1) == CoreSplit(frontends=(0,), engine=8, senders=(9,))
    assert cores.first(4).senders == (9, 10, 11, 12)
    assert cores.first(8) == cores


@pytest.mark.parametrize(("frontends", "needed"), [(8, 13), (3, 6), (1, 3)])
def test_too_few_cores_are_refused(frontends: int, needed: int) -> None:
    assert len(split_cores(range(needed), frontends).frontends) == frontends
    with pytest.raises(BenchError, match=f"{frontends} front-ends are measured on {needed} cores or more"):
        split_cores(range(needed - 1), frontends)


def test_one_thread_of_each_physical_core_comes_first(tmp_path: Path) -> None:
    for core, siblings in enumerate(["0-1", "0-1", "2,5", "3", "4", "2,5"]):
        file = tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{siblings}\n")
    assert one_thread_first({0, 1, 2, 3, 4, 5}, tmp_path) == [0, 2, 3, 4, 1, 5]
    # The other thread belongs to somebody else.
    assert one_thread_first({1, 5, 3, 9}, tmp_path) == [1, 3, 5, 9]


def test_a_ratio_is_refused_where_the_front_ends_were_not_the_limit() -> None:
    check_limit(ScalingRuns(one=[run(90.0)], all=[run(700.0, frontend_idle=0.4)]))
    with pytest.raises(BenchError, match="load generator's cores were idle for 5%"):
        check_limit(ScalingRuns(one=[run(90.0)], all=[run(700.0, sender_idle=0.05)]))
    with pytest.raises(BenchError, match="one front-end was idle for 20%"):
        check_limit(ScalingRuns(one=[run(90.0, frontend_idle=0.2)], all=[run(700.0)]))


def test_ratios_are_of_neighbouring_runs() -> None:
    runs = ScalingRuns(one=[run(100.0), run(50.0), run(100.0)], all=[run(700.0), run(300.0), run(800.0)])
    assert runs.ratios == [7.0, 6.0, 8.0]
    assert described(runs).startswith("100 to 700 requests/s, 7.00 times as many; idle: one front-end 0%, ")
    assert described(runs).endswith("senders 30%")
    busy = ScalingRuns(one=[run(1.0)], all=[run(5.0, sender_idle=0.02)])
    assert described(busy).endswith("senders 2%, so that the senders may be the limit")
