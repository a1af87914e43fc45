"""When batches run, and from when a request's budget counts."""

import logging
from collections.abc import Callable

import pytest

from penstock.serve.batch_loop import SAMPLED, SAMPLED_NS, BatchLoop

MS = 1_000_000


class Loop:
    """An event loop whose polls and clock a test plays."""

    def __init__(self, batch_ms: int = 0, max_read_ms: int = 5) -> None:
        self.now_ns = 100 * MS
        self.soon: list[object] = []
        self.waiting = 0
        self.batch_ns = batch_ms * MS
        self.ran: list[int] = []
        self.batch_loop = BatchLoop(
            self._work, call_soon=self.soon.append, clock_ns=lambda: self.now_ns, max_read_ns=max_read_ms * MS
        )

    def _work(self) -> int:
        done, self.waiting = self.waiting, 0
        if done:
            self.ran.append(done)
            self.now_ns += self.batch_ns
        return done

    def read(self, took_ms: int = 0) -> int:
        """Read a request as a connection does; returns its age in milliseconds."""
        self.now_ns += took_ms * MS
        self.batch_loop.run_if_overdue(self.now_ns)
        arrival_ns = self.batch_loop.arrival_ns(self.now_ns)
        self.waiting += 1
        self.batch_loop.wake()
        return (self.now_ns - arrival_ns) // MS

    def after_poll(self) -> None:
        """Call what was put off until after the poll."""
        soon, self.soon[:] = list(self.soon), []
        for call in soon:
            assert callable(call)
            call()


def test_many_wakes_make_one_batch_and_an_idle_loop_rests() -> None:
    loop = Loop()
    for _ in range(3):
        loop.read()
    assert len(loop.soon) == 1
    loop.after_poll()
    assert loop.ran == [3]
    loop.after_poll()
    assert loop.soon == []


def test_a_request_of_an_idle_server_has_just_arrived() -> None:
    assert Loop().read() == 0


def test_what_arrived_while_a_batch_ran_counts_from_before_it() -> None:
    loop = Loop(batch_ms=20)
    loop.read()
    loop.after_poll()
    assert loop.read() == 20


def test_what_is_read_late_in_the_first_poll_counts_from_its_begin() -> None:
    loop = Loop(max_read_ms=1000)
    loop.read()
    assert loop.read(took_ms=7) == 7


def test_a_long_poll_is_interrupted_by_a_batch() -> None:
    loop = Loop(batch_ms=10)
    for _ in range(3):
        loop.read(took_ms=2)
    assert loop.ran == []
    late = loop.read(took_ms=2)
    assert loop.ran == [3]
    # It was readable when the poll began, and waited for the batch as well.
    assert late >= 6
    loop.after_poll()
    assert loop.ran == [3, 1]


def test_the_arrival_alone_runs_no_batch() -> None:
    loop = Loop(batch_ms=10)
    loop.read()
    loop.now_ns += 100 * MS
    assert loop.batch_loop.arrival_ns(loop.now_ns) == loop.now_ns - 100 * MS
    assert loop.ran == []


def test_the_kernel_is_asked_for_one_arrival_of_many_that_are_read_after_one_another() -> None:
    loop = Loop()
    asked: list[int] = []

    def age() -> int:
        asked.append(loop.now_ns)
        return 3 * MS

    first = loop.batch_loop.sampled_arrival_ns(loop.now_ns, age)
    assert first == loop.now_ns - 3 * MS
    for _ in range(SAMPLED - 1):
        loop.now_ns += 1_000
        assert loop.batch_loop.sampled_arrival_ns(loop.now_ns, age) == first
    loop.now_ns += 1_000
    assert loop.batch_loop.sampled_arrival_ns(loop.now_ns, age) == loop.now_ns - 3 * MS
    assert len(asked) == 2
    # What is read some time later came some time later.
    loop.now_ns += SAMPLED_NS
    assert loop.batch_loop.sampled_arrival_ns(loop.now_ns, age) == loop.now_ns - 3 * MS


@pytest.mark.parametrize("early", [False, True])
def test_a_batch_that_raises_is_logged_and_does_not_keep_the_next_from_running(
    early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    batch_loop = BatchLoop(
        lambda: 1 // loop.waiting, call_soon=loop.soon.append, clock_ns=lambda: loop.now_ns, max_read_ns=MS
    )
    batch_loop.wake()
    with caplog.at_level(logging.ERROR):
        if early:
            assert batch_loop.run_if_overdue(loop.now_ns + 2 * MS)
        else:
            loop.after_poll()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    loop.waiting = 1
    batch_loop.wake()
    loop.after_poll()
    assert len(loop.soon) == 1


def test_an_early_run_goes_on_for_as_long_as_was_read() -> None:
    loop = Loop(max_read_ms=5)
    batches = iter(range(100))

    def work() -> int:
        loop.now_ns += 2 * MS
        return next(batches) + 1

    loop.batch_loop = BatchLoop(work, call_soon=loop.soon.append, clock_ns=lambda: loop.now_ns, max_read_ns=5 * MS)
    loop.read()
    loop.read(took_ms=6)
    assert next(batches) == 3  # of 2 ms each: the third goes past 5 ms
    loop.after_poll()
    assert next(batches) == 5  # after a poll one alone, so that what arrived meanwhile is read


def test_a_batch_does_not_run_within_another() -> None:
    loop = Loop()
    inside: list[bool] = []

    def work() -> int:
        inside.append(loop.batch_loop.run_if_overdue(loop.now_ns + 100 * MS))
        return 0

    loop.batch_loop = BatchLoop(work, call_soon=loop.soon.append, clock_ns=lambda: loop.now_ns, max_read_ns=MS)
    loop.batch_loop.wake()
    assert loop.batch_loop.run_if_overdue(loop.now_ns + 2 * MS)
    assert inside == [False]


def test_the_share_of_reading_is_followed() -> None:
    loop = Loop(batch_ms=1, max_read_ms=1000)
    assert loop.batch_loop.reading_share == 0
    for _ in range(100):
        loop.read()
        loop.read(took_ms=3)
        loop.after_poll()
    assert loop.batch_loop.reading_share == pytest.approx(0.75, abs=0.02)


class HeldLoop(Loop):
    """A loop whose batches wait for so long, with its timers."""

    def __init__(self, hold_ms: int) -> None:
        super().__init__(batch_ms=1)
        self.hold_ms = hold_ms
        self.cpu_ns = 0
        self.gathers = False
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.batch_loop = BatchLoop(
            self._work,
            call_soon=self.soon.append,
            clock_ns=lambda: self.now_ns,
            cpu_ns=lambda: self.cpu_ns,
            max_read_ns=5 * MS,
        )
        self.batch_loop.hold(
            lambda: self.hold_ms * MS if self.waiting else 0,
            lambda: self.gathers,
            lambda s, call: self.later.append((s, call)),
        )


def test_a_batch_that_is_held_takes_what_comes_meanwhile() -> None:
    loop = HeldLoop(hold_ms=4)
    loop.read()
    loop.after_poll()
    assert (loop.ran, loop.soon) == ([], [])
    # A request that is read while a batch waits has just come, and runs nothing early.
    assert [loop.read(took_ms=6), loop.read(took_ms=6)] == [0, 0]
    loop.cpu_ns += 3 * MS
    ((wait_s, end),) = loop.later
    assert wait_s == 0.004
    end()
    assert loop.ran == []
    loop.after_poll()
    assert loop.ran == [3]
    # Reading took 3 ms of the wait, the batch 1 ms.
    assert loop.batch_loop.reading_share == pytest.approx(0.75, abs=0.01)
    loop.after_poll()
    assert (loop.soon, len(loop.later)) == ([], 1)


def test_a_loop_without_a_wait_runs_at_once() -> None:
    loop = HeldLoop(hold_ms=0)
    loop.read()
    loop.after_poll()
    assert (loop.ran, loop.later) == ([1], [])


def test_a_long_poll_of_streams_is_interrupted_later() -> None:
    loop = HeldLoop(hold_ms=0)
    loop.gathers = True
    for _ in range(11):
        loop.read(took_ms=2)
    assert loop.ran == []
    loop.read(took_ms=2)
    assert loop.ran == [11]
    # Counted from the batch.
    loop.gathers = False
    for _ in range(3):
        loop.read(took_ms=2)
    assert loop.ran == [11, 3]
