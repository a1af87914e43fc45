"""When turns are taken, and from when a request's budget counts."""

import pytest

from penstock.serve.turns import Turns

MS = 1_000_000


class Loop:
    """A loop whose polls and clock a test makes up."""

    def __init__(self, batch_ms: int = 0, longest_read_ms: int = 5) -> None:
        self.now_ns = 100 * MS
        self.soon: list[object] = []
        self.waiting = 0
        self.batch_ns = batch_ms * MS
        self.ran: list[int] = []
        self.turns = Turns(
            self._work,
            call_soon=self.soon.append,
            clock_ns=lambda: self.now_ns,
            longest_read_ns=longest_read_ms * MS,
        )

    def _work(self) -> int:
        done, self.waiting = self.waiting, 0
        if done:
            self.ran.append(done)
            self.now_ns += self.batch_ns
        return done

    def read(self, took_ms: int = 0) -> int:
        """A request is found readable; gives how long ago it is said to have come, in milliseconds."""
        self.now_ns += took_ms * MS
        arrival_ns = self.turns.arrived(self.now_ns)
        self.waiting += 1
        self.turns.wake()
        return (self.now_ns - arrival_ns) // MS

    def after_poll(self) -> None:
        """What was put off until after the poll."""
        soon, self.soon[:] = list(self.soon), []
        for call in soon:
            assert callable(call)
            call()


def test_many_wakes_make_one_turn_and_an_idle_loop_rests() -> None:
    loop = Loop()
    for _ in range(3):
        loop.read()
    assert len(loop.soon) == 1
    loop.after_poll()
    assert loop.ran == [3]
    loop.after_poll()
    assert loop.soon == []


def test_a_request_of_an_idle_server_has_just_come() -> None:
    assert Loop().read() == 0


def test_what_came_while_a_batch_ran_counts_from_before_it() -> None:
    loop = Loop(batch_ms=20)
    loop.read()
    loop.after_poll()
    assert loop.read() == 20


def test_what_is_read_late_in_the_first_poll_counts_from_its_begin() -> None:
    loop = Loop(longest_read_ms=1000)
    loop.read()
    assert loop.read(took_ms=7) == 7


def test_a_long_poll_is_interrupted_by_a_turn() -> None:
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


def test_a_turn_that_raises_does_not_keep_the_next_from_being_taken() -> None:
    loop = Loop()
    loop.turns = Turns(
        lambda: 1 // loop.waiting, call_soon=loop.soon.append, clock_ns=lambda: loop.now_ns, longest_read_ns=MS
    )
    loop.turns.wake()
    with pytest.raises(ZeroDivisionError):
        loop.after_poll()
    loop.waiting = 1
    loop.turns.wake()
    loop.after_poll()
    assert len(loop.soon) == 1


def test_a_turn_in_the_middle_of_a_poll_runs_batches_for_as_long_as_was_read() -> None:
    loop = Loop(longest_read_ms=5)
    batches = iter(range(100))

    def work() -> int:
        loop.now_ns += 2 * MS
        return next(batches) + 1

    loop.turns = Turns(work, call_soon=loop.soon.append, clock_ns=lambda: loop.now_ns, longest_read_ns=5 * MS)
    loop.read()
    loop.read(took_ms=6)
    assert next(batches) == 3  # of 2 ms each: the third goes past 5 ms
    loop.after_poll()
    assert next(batches) == 5  # after a poll one alone, so that what came meanwhile is read


def test_the_share_of_reading_is_followed() -> None:
    loop = Loop(batch_ms=1, longest_read_ms=1000)
    assert loop.turns.reading_share == 0
    for _ in range(100):
        loop.read()
        loop.read(took_ms=3)
        loop.after_poll()
    assert loop.turns.reading_share == pytest.approx(0.75, abs=0.02)
