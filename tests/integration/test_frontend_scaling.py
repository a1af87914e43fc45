"""The measurement of several front-ends, with one front-end beside one on two cores."""

import os

import pytest

from benchmarks.acceptance.server.frontend_scaling import CoreSplit, compare
from penstock.bench.compiled_program import find_compiler


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_penstock_and_the_yardstick_are_measured_in_turn() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    said: list[str] = []
    cores = CoreSplit(frontends=(first,), engine=second, senders=(second,))
    runs = compare(cores, 2, 0.5, said.append, connections=16)
    assert [len(said), *(len(each.ratios) for each in runs)] == [8, 2, 2]
    for each in runs:
        assert all(run.rate > 100 for run in (*each.one, *each.all))
        # The same server twice; the machine's speed varies.
        assert all(0.2 < ratio < 5 for ratio in each.ratios)
