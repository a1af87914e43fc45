"""Stretches of time, against sets of nanoseconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.train.profile.intervals import Span, Spans, common, length_ns, union, within, without
from penstock.train.profile.step_time import PARTS, ActivitySpans, parts_of, split

MOST = 40
spans = st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(lambda pair: Span(*pair)), max_size=8)


def inside(some: list[Span]) -> set[int]:
    return {at for span in some for at in range(span.start_ns, span.end_ns)}


def is_in_order(some: Spans) -> bool:
    apart = all(one.end_ns < other.start_ns for one, other in pairwise(some))
    return apart and all(span.length_ns > 0 for span in some)


@given(spans, spans)
def test_spans_are_sets_of_nanoseconds(some: list[Span], others: list[Span]) -> None:
    one, other = union(some), union(others)
    assert inside(one) == inside(some)
    assert is_in_order(one)
    assert inside(common(one, other)) == inside(one) & inside(other)
    for window in other:
        assert within(one, window) == common(one, [window])
    assert inside(without(one, other)) == inside(one) - inside(other)
    assert length_ns(one) == len(inside(one))


@given(spans, spans, spans, spans, st.integers(0, MOST), st.integers(1, MOST))
def test_every_nanosecond_of_a_step_is_in_exactly_one_part(
    compute: list[Span], collective: list[Span], moving: list[Span], waiting: list[Span], start_ns: int, length: int
) -> None:
    window = Span(start_ns, start_ns + length)
    activities = ActivitySpans(
        compute=union(compute), collective=union(collective), moving=union(moving), waiting=union(waiting)
    )
    parts = parts_of(window, activities)
    assert list(parts) == list(PARTS)
    assert sorted(at for part in parts.values() for at in inside(part)) == list(range(*window))
    shares = split(window, activities)
    assert shares.wall_ns == sum(shares.parts.values()) == length
    assert shares.compute_ns == len(inside(compute) & inside([window]))
    assert shares.overlapped_ns == len(inside(compute) & inside(collective) & inside([window]))
    assert shares.input_ns == len((inside([window]) & inside(waiting)) - inside(compute) - inside(collective))
