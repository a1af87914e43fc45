"""Chunks of a stream against the time that they last."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.streams.signal_pace import AHEAD_NS, SignalPace

MS = 1_000_000
CHUNK_NS = 20 * MS
AT_ONCE = 1 + AHEAD_NS // CHUNK_NS


def test_a_stream_in_real_time_is_never_ahead_whatever_the_size_of_its_messages() -> None:
    for each in (1, 4, AT_ONCE):
        pace = SignalPace(CHUNK_NS, 0)
        times = (each * turn * CHUNK_NS for turn in range(1, 200))
        assert [pace.ahead(each, now_ns, now_ns) for now_ns in times] == [0] * 199


def test_a_stream_in_real_time_that_had_no_turn_for_long_is_not_ahead() -> None:
    """What was taken between turns does not count."""
    pace = SignalPace(CHUNK_NS, 0)
    assert pace.ahead(2, 60_000 * MS, 60_000 * MS) == 0


def test_a_stream_in_real_time_that_waited_for_its_turn_is_not_ahead() -> None:
    pace = SignalPace(CHUNK_NS, 0)
    began_ns = 1_000 * CHUNK_NS
    assert pace.ahead(100, began_ns, began_ns + 100 * CHUNK_NS) == 0
    # And has no more left than before.
    assert pace.ahead(AT_ONCE + 5, began_ns + 100 * CHUNK_NS, began_ns + 100 * CHUNK_NS) == 5


def test_what_comes_at_once_is_ahead_beyond_a_jitter() -> None:
    pace = SignalPace(CHUNK_NS, 0)
    assert pace.ahead(100, 0, 0) == 100 - AT_ONCE
    assert pace.ahead(0, 10 * CHUNK_NS, 10 * CHUNK_NS) == 0
    assert pace.ahead(15, 10 * CHUNK_NS, 10 * CHUNK_NS) == 5


def test_a_pause_allows_no_more_than_a_jitter() -> None:
    pace = SignalPace(CHUNK_NS, 0)
    assert pace.ahead(AT_ONCE, 0, 0) == 0
    hour_ns = 3_600_000 * MS
    assert pace.ahead(50, hour_ns, hour_ns) == 50 - AT_ONCE


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500 * MS), st.integers(0, 500 * MS)), max_size=50))
def test_the_chunks_that_are_not_ahead_fit_into_the_time(turns: list[tuple[int, int, int]]) -> None:
    pace, chunks, now_ns, ahead = SignalPace(CHUNK_NS, 0), 0, 0, 0
    for came, passed_ns, waited_ns in turns:
        chunks, since_ns = chunks + came, now_ns + passed_ns
        now_ns = since_ns + waited_ns
        ahead += pace.ahead(came, since_ns, now_ns)
    assert 0 <= ahead <= chunks
    assert chunks - ahead <= AT_ONCE + now_ns / CHUNK_NS
