"""What is kept of a stream: chunks come out as they went in, within the memory that there is."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ServeError
from penstock.serve.control.front_end import bounds_of, replay_of
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.settings import BatchSettings, LimitSettings, ModelSettings, Settings
from penstock.serve.streams.replay_ring import BESIDE, KeptChunk, ReplayLimits, ReplayMemory, ReplayRing

FRAME_BYTES, BLOCK = 2, 72
FRAMES = (BLOCK - BESIDE) // FRAME_BYTES  # of the longest chunk


def ring_of(max_blocks: int = 100, max_bytes: int = 1 << 20) -> tuple[ReplayRing, ReplayMemory]:
    memory = ReplayMemory(RequestBounds(max_bytes=max_bytes))
    return ReplayRing(memory, frame_bytes=FRAME_BYTES, block_bytes=BLOCK, max_blocks=max_blocks), memory


def samples(number: int, frames: int) -> bytes:
    return bytes((number + at) % 256 for at in range(frames * FRAME_BYTES))


def read(ring: ReplayRing) -> list[tuple[bytes, int, bool, bool]]:
    return [(bytes(chunk.samples), *chunk[1:]) for chunk in ring.begin()]


@given(st.lists(st.integers(0, FRAMES), max_size=80), st.sets(st.integers(0, 79)), st.integers(0, 80))
def test_chunks_come_out_as_they_went_in_from_the_last_clear_state(
    lengths: Sequence[int], resets: set[int], reported: int
) -> None:
    ring, memory = ring_of()
    expected: list[tuple[bytes, int, bool, bool]] = []
    reported = min(reported, len(lengths))
    for number, frames in enumerate(lengths):
        assert ring.append(samples(number, frames), frames)
        expected.append((samples(number, frames), frames, False, number in resets))
        if number in resets:
            ring.reset()
    ring.reported = reported
    found = read(ring)
    # Dropped is what lies before the last reset whose results were all handed out.
    kept_from = max((number + 1 for number in resets if number < len(lengths) and number + 1 <= reported), default=0)
    assert found == expected[kept_from:]
    assert (ring.chunks, ring.reported) == (len(lengths) - kept_from, reported - kept_from)
    assert ring.total_reported == reported
    ring.drop()
    assert memory.held_bytes == memory.bounds.held_bytes == 0


def test_chunks_that_come_while_it_is_read_are_read_too() -> None:
    ring, _ = ring_of()
    ring.append(b"ab", 1)
    ring.hold()
    chunks = ring.begin()
    assert next(chunks) == KeptChunk(memoryview(b"ab"), 1, False, False)
    ring.append(b"cd", 1)
    ring.reset()
    ring.append(b"ef", 1)
    ring.ended = True
    assert [(bytes(chunk.samples), *chunk[1:]) for chunk in chunks] == [
        (b"cd", 1, False, True),
        (b"ef", 1, True, False),
    ]


def test_nothing_is_dropped_while_it_is_read() -> None:
    ring, _ = ring_of(max_blocks=2)
    ring.append(samples(0, 4), 4)
    ring.reset()
    ring.hold()
    chunks = ring.begin()
    ring.reported = 1
    ring.append(samples(1, 4), 4)
    assert [chunk.frames for chunk in chunks] == [4, 4]
    assert ring.chunks == 2
    ring.release()
    ring.reset()
    assert (ring.chunks, ring.reported) == (1, 0)


def test_a_ring_is_full_after_its_blocks_and_after_twice_as_many_while_it_is_held() -> None:
    ring, memory = ring_of(max_blocks=2)
    whole = samples(0, FRAMES)
    assert [ring.append(whole, FRAMES) for _ in range(3)] == [True, True, False]
    ring.hold()
    assert [ring.append(whole, FRAMES) for _ in range(3)] == [True, True, False]
    assert memory.held_bytes == 4 * BLOCK
    assert not ring.full_memory


def test_tiny_chunks_fill_a_block_by_their_number() -> None:
    ring, memory = ring_of(max_blocks=1)
    for _ in range(BLOCK // BESIDE):
        assert ring.append(b"", 0)
    assert not ring.append(b"", 0)
    assert memory.held_bytes == BLOCK


def test_all_rings_share_half_of_the_budget() -> None:
    bounds = RequestBounds(max_bytes=1_000)
    memory = ReplayMemory(bounds)
    assert memory.take(500)
    assert not memory.take(1)
    memory.give(100)
    # What requests hold leaves less.
    bounds.held_bytes += 550
    assert not memory.take(100)
    assert memory.take(50)
    assert (memory.held_bytes, bounds.held_bytes) == (450, 1_000)
    ring = ReplayRing(memory, frame_bytes=2, block_bytes=64, max_blocks=9)
    assert not ring.append(b"ab", 1)
    assert ring.full_memory


def test_a_ring_holds_the_seconds_that_are_asked_for() -> None:
    memory = ReplayMemory(RequestBounds())
    ring = ReplayRing.of_signal(ReplayLimits(memory, 2.5, 30.0), rate_hz=16_000, frame_bytes=2, chunk_bytes=2_560)
    chunk, count = bytes(2_560), 0
    while ring.append(chunk, 1_280):
        count += 1
    # Three blocks of a second, each of 12 whole chunks.
    assert (count, memory.held_bytes) == (36, 3 * (32_000 + BESIDE))


def test_a_chunk_may_be_longer_than_a_second() -> None:
    memory = ReplayMemory(RequestBounds())
    ring = ReplayRing.of_signal(ReplayLimits(memory, 1.0, 30.0), rate_hz=0.5, frame_bytes=4, chunk_bytes=40)
    assert ring.append(bytes(40), 10)
    assert not ring.append(bytes(40), 10)


@pytest.mark.parametrize(("frontends", "replay_s", "kept"), [(1, 60.0, True), (0, 60.0, False), (2, 0.0, False)])
def test_nothing_is_kept_where_the_engine_takes_the_front_end_along_or_it_is_off(
    tmp_path_factory: pytest.TempPathFactory, frontends: int, replay_s: float, kept: bool
) -> None:
    models = ModelSettings(bundles=(tmp_path_factory.mktemp("bundle"),))
    settings = Settings(
        models=models, frontends=frontends, limits=LimitSettings(replay_s=replay_s, max_unfinished_mib=8)
    )
    limits = replay_of(settings, bounds_of(settings.limits))
    assert (limits is not None) == kept
    if limits is not None:
        assert (limits.ring_s, limits.wait_s, limits.memory.bounds.max_bytes) == (60.0, 30.0, 8 << 20)


def test_options_out_of_range_are_named() -> None:
    for wrong in (-1.0, 3_601.0, float("nan")):
        with pytest.raises(ServeError, match=f"--replay-s is {wrong:g}; it must be from 0"):
            LimitSettings(replay_s=wrong)
    for wrong in (0.0, 3_601.0):
        with pytest.raises(ServeError, match=f"--resume-timeout-s is {wrong:g}; it must be above 0"):
            LimitSettings(resume_timeout_s=wrong)
    for wrong in (-0.1, 0.95):
        with pytest.raises(ServeError, match=f"--stream-headroom is {wrong:g}; it must be from 0 to 0.9"):
            BatchSettings(stream_headroom=wrong)


STATE = b"state" * 4
APPEND, RESET, MARK, KNOW, REPORT = range(5)


@given(st.lists(st.sampled_from([APPEND, APPEND, RESET, MARK, KNOW, REPORT]), max_size=80))
def test_chunks_begin_at_the_last_state_that_is_clear_or_known(moves: list[int]) -> None:
    ring, memory = ring_of()
    chunks: list[tuple[bytes, int, bool, bool]] = []
    # Where a state is clear (None) or known, by the chunks before it.
    known: dict[int, bytes | None] = {0: None}
    marked: int | None = None
    reported = 0
    for move in moves:
        if move in (APPEND, RESET, MARK):
            assert ring.append(samples(len(chunks), 3), 3)
            chunks.append((samples(len(chunks), 3), 3, False, move == RESET))
        if move == RESET:
            ring.reset()
            known[len(chunks)] = None
        elif move == MARK:
            ring.mark()
            marked = len(chunks)
        elif move == KNOW and marked is not None and marked <= reported:
            ring.know(STATE + bytes([marked]))
            known[marked], marked = STATE + bytes([marked]), None
        elif move == REPORT and reported < len(chunks):
            reported += 1
            ring.reported += 1
    begin = max(at for at in known if at <= reported)
    assert read(ring) == chunks[begin:]
    assert ring.state == known[begin]
    assert (ring.chunks, ring.reported, ring.total_reported) == (len(chunks) - begin, reported - begin, reported)
    ring.drop()
    assert memory.held_bytes == memory.bounds.held_bytes == 0


def test_a_state_takes_memory_too() -> None:
    ring, memory = ring_of()
    assert ring.begin_from(STATE)
    assert memory.held_bytes == len(STATE)
    assert ring.state == STATE
    ring.append(b"ab", 1)
    ring.mark()
    ring.reported = 1
    ring.know(STATE * 2)
    # The block and the state before were given back.
    assert memory.held_bytes == 2 * len(STATE)
    ring.drop()
    assert memory.held_bytes == 0


def test_a_state_for_which_there_is_no_memory_is_not_kept() -> None:
    ring, memory = ring_of(max_bytes=2 * BLOCK + 8)
    assert not ring.begin_from(bytes(BLOCK + 5))
    assert ring.full_memory
    ring, memory = ring_of(max_bytes=2 * BLOCK + 8)
    assert ring.append(b"ab", 1)
    ring.mark()
    ring.reported = 1
    ring.know(STATE)
    assert ring.state is None
    assert read(ring) == [(b"ab", 1, False, False)]
    assert memory.held_bytes == BLOCK


def test_a_state_that_comes_after_the_ring_was_dropped_is_dropped_too() -> None:
    ring, memory = ring_of()
    ring.append(b"ab", 1)
    ring.mark()
    ring.drop()
    ring.know(STATE)
    assert memory.held_bytes == 0
