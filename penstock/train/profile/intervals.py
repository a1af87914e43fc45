"""Sets of time intervals in whole nanoseconds, so that parts add up to the whole."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple


class Span(NamedTuple):
    """From `start_ns` to before `end_ns`."""

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """The length."""
        return self.end_ns - self.start_ns


# In order, none of them empty, and none touching another.
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Unite spans, given in any order."""
    return _combined(spans, (), lambda inside, _: inside)


def common(some: Spans, others: Spans) -> Spans:
    """Intersect two sets of spans."""
    return _combined(some, others, lambda inside, inside_other: inside and inside_other)


def within(spans: Spans, window: Span) -> Spans:
    """Cut a set of spans to a window; the spans outside of it are not looked at."""
    first = bisect_right(spans, window.start_ns, key=attrgetter("end_ns"))
    last = bisect_left(spans, window.end_ns, key=attrgetter("start_ns"))
    return [Span(max(span.start_ns, window.start_ns), min(span.end_ns, window.end_ns)) for span in spans[first:last]]


def without(some: Spans, others: Spans) -> Spans:
    """Subtract the second set of spans from the first."""
    return _combined(some, others, lambda inside, inside_other: inside and not inside_other)


def length_ns(spans: Spans) -> int:
    """Compute the total length."""
    return sum(span.length_ns for span in spans)


def _combined(some: Iterable[Span], others: Iterable[Span], kept: Callable[[bool, bool], bool]) -> Spans:
    """Sweep over the ends of all spans, and keep the times at which `kept(in some, in others)` holds."""
    changes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for index, spans in enumerate((some, others)):
        for start_ns, end_ns in spans:
            if start_ns < end_ns:
                changes[start_ns][index] += 1
                changes[end_ns][index] -= 1
    found: Spans = []
    begin_ns: int | None = None
    first = second = 0
    for at_ns, (more, more_others) in sorted(changes.items()):
        first, second = first + more, second + more_others
        if kept(first > 0, second > 0) != (begin_ns is not None):
            if begin_ns is None:
                begin_ns = at_ns
            else:
                found.append(Span(begin_ns, at_ns))
                begin_ns = None
    return found
