"""The order and the length of times with and without faults, on a clock of the test's own."""

from itertools import pairwise
from typing import cast

import pytest

from penstock.bench.chaos import quiet_times
from penstock.bench.chaos.chaos_history import QuietTime
from penstock.bench.chaos.quiet_times import FAULTS_TOGETHER, QuietTimes
from penstock.bench.chaos.run_load import RunLoad
from penstock.bench.chaos.subject import Subject
from penstock.serve.control.fork_server import GATHER_S

FAULT_S, SETTLE_S, ADAPT_S, LOOK_TAKES_S = 2.0, 1.0, 7.0, 0.45


class Clock:
    """Time that passes where something sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Settling:
    """A server that settles in a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait_settled(self, limit_s: float, *, serves: bool) -> bool:
        assert serves
        self._clock.sleep(SETTLE_S)
        return True

    def wait_back(self, limit_s: float, *, whole: bool) -> bool:
        assert whole
        self._clock.sleep(LOOK_TAKES_S)
        return True


class Adapted:
    """A load whose rate is measured for some seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def adapt(self) -> None:
        self._clock.sleep(ADAPT_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quiet_times, "time", clock)
    return clock


def run(clock: Clock, events: int, end_s: float) -> tuple[list[tuple[float, float]], list[float]]:
    times: list[QuietTime] = []
    quiet = QuietTimes(cast("Subject", Settling(clock)), cast("RunLoad", Adapted(clock)), times, None)
    faults: list[float] = []
    for done in range(events):
        if not quiet.before(done, events - done, end_s):
            break
        faults.append(clock.now_s)
        clock.sleep(FAULT_S)
        quiet.after(done + 1, is_last=done + 1 == events)
    assert [quiet.after_faults for quiet in times] == [number % 2 == 0 for number in range(len(times))]
    for quiet in times:
        assert quiet.pair_begin_s <= quiet.begin_s < quiet.end_s <= quiet.pair_end_s
        own = [at_s for at_s in faults if quiet.pair_begin_s <= at_s < quiet.pair_end_s]
        assert own
        assert (own[-1] < quiet.begin_s) if quiet.after_faults else (own[0] >= quiet.end_s)
    assert all(later.pair_begin_s >= earlier.pair_end_s + ADAPT_S for earlier, later in pairwise(times))
    return [(quiet.begin_s, quiet.end_s) for quiet in times], faults


def test_times_alternate_in_turned_order_and_are_as_long(clock: Clock) -> None:
    spans, faults = run(clock, 4 * FAULTS_TOGETHER, 1e6)
    together_s = FAULTS_TOGETHER * FAULT_S + GATHER_S + SETTLE_S
    assert [end_s - begin_s for begin_s, end_s in spans] == pytest.approx([together_s] * 4)
    begins = faults[::FAULTS_TOGETHER]
    order = "".join(kind for _, kind in sorted([*((at, "f") for at in begins), *((at, "q") for at, _ in spans)]))
    assert order == "fqqffqqf"


def test_no_fault_comes_in_a_time_without_or_before_postponed_work_is_done(clock: Clock) -> None:
    spans, faults = run(clock, 5 * FAULTS_TOGETHER, 1e6)
    for begin_s, end_s in spans:
        assert not [at_s for at_s in faults if begin_s - GATHER_S - SETTLE_S < at_s < end_s]


def test_no_pair_begins_that_would_not_end(clock: Clock) -> None:
    together_s = FAULTS_TOGETHER * FAULT_S + GATHER_S + SETTLE_S
    spans, faults = run(clock, 1_000, clock.now_s + 5 * together_s)
    assert (len(spans), len(faults)) == (2, 2 * FAULTS_TOGETHER)


@pytest.mark.parametrize("events", [2, FAULTS_TOGETHER + 2])
def test_fewer_faults_have_less_time_without(clock: Clock, events: int) -> None:
    spans, faults = run(clock, events, 1e6)
    assert len(faults) == events
    share = events % FAULTS_TOGETHER / FAULTS_TOGETHER
    begin_s, end_s = spans[-1]
    together_s = FAULTS_TOGETHER * FAULT_S + GATHER_S + SETTLE_S
    alone_s = events * FAULT_S + GATHER_S + SETTLE_S
    assert end_s - begin_s == pytest.approx(alone_s if len(spans) == 1 else share * together_s)


def test_faults_that_the_server_does_not_survive_are_of_a_pair_too(clock: Clock) -> None:
    times: list[QuietTime] = []
    quiet = QuietTimes(cast("Subject", Settling(clock)), cast("RunLoad", Adapted(clock)), times, None)
    begun_s = clock.now_s
    assert quiet.before(0, 9, 1e6)
    clock.sleep(FAULT_S)
    quiet.after(1, is_last=False)
    quiet.end()
    quiet.end()
    (only,) = times
    assert (only.pair_begin_s, only.pair_end_s) == (begun_s, begun_s + FAULT_S)
    assert only.begin_s == only.end_s
