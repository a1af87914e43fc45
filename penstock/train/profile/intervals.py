"""Sets of time intervals in whole nanoseconds, so that parts add up to the whole."""

from collections.abc import Iterable
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
    found: Spans = []
    for start_ns, end_ns in sorted(spans):
        if end_ns <= start_ns:
            continue
        if found and start_ns <= found[-1].end_ns:
            found[-1] = Span(found[-1].start_ns, max(end_ns, found[-1].end_ns))
        else:
            found.append(Span(start_ns, end_ns))
    return found


def common(some: Spans, others: Spans) -> Spans:
    """Intersect two sets of spans."""
    found: Spans = []
    first, second = 0, 0
    while first < len(some) and second < len(others):
        one, other = some[first], others[second]
        start_ns, end_ns = max(one.start_ns, other.start_ns), min(one.end_ns, other.end_ns)
        if start_ns < end_ns:
            found.append(Span(start_ns, end_ns))
        if one.end_ns <= other.end_ns:
            first += 1
        else:
            second += 1
    return found


def without(some: Spans, others: Spans) -> Spans:
    """Subtract the second set of spans from the first."""
    found: Spans = []
    second = 0
    for start_ns, end_ns in some:
        while second < len(others) and others[second].end_ns <= start_ns:
            second += 1
        at = second
        while at < len(others) and others[at].start_ns < end_ns:
            if start_ns < others[at].start_ns:
                found.append(Span(start_ns, others[at].start_ns))
            start_ns = others[at].end_ns
            at += 1
        if start_ns < end_ns:
            found.append(Span(start_ns, end_ns))
    return found


def length_ns(spans: Spans) -> int:
    """Compute the total length."""
    return sum(span.length_ns for span in spans)
