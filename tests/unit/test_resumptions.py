"""Streams that wait for an engine: the first one first, until their time is up."""

from dataclasses import dataclass, field

from penstock.serve.streams import resumptions as module
from penstock.serve.streams.resumptions import Resumptions
from penstock.serve.table.slots import COUNTS, LOST_NO_ENGINE, LOST_OUTGROWN, STREAMS_OPEN

S = 1_000_000_000


@dataclass(eq=False)
class Lost:
    """A stream, and others that end with it."""

    waiting: "Resumptions[Lost]"
    told: list[int] = field(default_factory=list[int])
    others: list["Lost"] = field(default_factory=list["Lost"])

    def give_up(self, status: int) -> None:
        self.told.append(status)
        for other in self.others:
            self.waiting.discard(other)


class Clock:
    now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns


def test_each_waits_its_own_time_and_ends_with_its_own_status() -> None:
    clock = Clock()
    waiting: Resumptions[Lost] = Resumptions(clock, 5.0)
    first, second = Lost(waiting), Lost(waiting)
    waiting.add(first, 4)
    clock.now_ns += 2 * S
    waiting.add(second, 5)
    assert list(waiting.first()) == [first, second]
    clock.now_ns += 3 * S
    waiting.expire()
    assert (first.told, second.told, waiting.waiting) == ([4], [], 1)
    clock.now_ns += 2 * S
    waiting.expire()
    assert (first.told, second.told, waiting.waiting) == ([4], [5], 0)
    assert waiting.uncounted[LOST_NO_ENGINE] == 2


def test_one_that_is_told_may_end_others() -> None:
    waiting: Resumptions[Lost] = Resumptions(Clock(), 5.0)
    second = Lost(waiting)
    first = Lost(waiting, others=[second])
    waiting.add(first, 4)
    waiting.add(second, 4)
    waiting.give_up()
    assert (first.told, second.told) == ([4], [])


def test_none_waits_once_it_is_closed() -> None:
    waiting: Resumptions[Lost] = Resumptions(Clock(), 5.0)
    before, after = Lost(waiting), Lost(waiting)
    waiting.add(before, 4)
    waiting.close()
    waiting.add(after, 5)
    waiting.expire()
    assert (before.told, after.told) == ([4], [5])


def test_some_at_a_time() -> None:
    waiting: Resumptions[Lost] = Resumptions(Clock(), 5.0)
    streams = [Lost(waiting) for _ in range(module.AT_ONCE + 1)]
    for stream in streams:
        waiting.add(stream, 4)
    assert list(waiting.first()) == streams[:-1]


def test_what_had_no_table_is_counted_once_in_the_next_but_for_open_streams() -> None:
    waiting: Resumptions[Lost] = Resumptions(Clock(), 5.0)
    waiting.uncounted[LOST_OUTGROWN] = 3
    waiting.uncounted[STREAMS_OPEN] = -3
    counts = [10] * COUNTS
    waiting.count_in(counts)
    waiting.count_in(counts)
    assert (counts[LOST_OUTGROWN], counts[STREAMS_OPEN]) == (13, 10)
    assert sum(counts) == 10 * COUNTS + 3
