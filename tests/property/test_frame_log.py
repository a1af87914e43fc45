"""Frames of utterances: however they come, the same frames are kept, each in one utterance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.spec import Array
from penstock.core.speech.utterance_decoder import BLANK_LOG_PROBABILITY
from penstock.serve.streams.frame_log import MAX_BYTES, MAX_FRAMES, FrameLog

SYMBOLS = 4


def frames_of(blanks: list[bool]) -> Array:
    """Frames that are surely blank or not, told apart by their second symbol."""
    frames_TV = np.full((len(blanks), SYMBOLS), -20.0, np.float32)
    frames_TV[:, 0] = np.where(blanks, -1e-6, -1.0)
    frames_TV[:, 1] = -np.arange(len(blanks)) / 64
    return frames_TV


def kept(blanks: list[bool]) -> list[int]:
    return [at for at, blank in enumerate(blanks) if not (blank and at and blanks[at - 1])]


@given(st.lists(st.booleans(), max_size=60), st.lists(st.integers(0, 9), max_size=40))
def test_any_cut_keeps_the_same_frames(blanks: list[bool], cuts: list[int]) -> None:
    frames_TV, log, at = frames_of(blanks), FrameLog(SYMBOLS), 0
    for count in cuts:
        log.add(frames_TV[at : at + count].reshape(-1))
        at += count
    log.add(frames_TV[at:].reshape(-1))
    found = log.take()
    numbers = kept(blanks)
    if found is None:
        assert not numbers
        return
    assert found.frame_T.tolist() == numbers
    sure = found.log_probability_TV[:, 0] >= BLANK_LOG_PROBABILITY
    assert sure.tolist() == [blanks[at] for at in numbers]
    # Those that are not blank are as they were, and a blank has no other symbol.
    np.testing.assert_array_equal(found.log_probability_TV[~sure], frames_TV[numbers][~sure].astype(np.float16))
    assert np.isneginf(found.log_probability_TV[sure][:, 1:]).all()


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 40))
def test_an_end_parts_the_frames(blanks: list[bool], until: int) -> None:
    log = FrameLog(SYMBOLS)
    log.add(frames_of(blanks).reshape(-1))
    first, second = log.take(until), log.take()
    numbers = [[] if part is None else part.frame_T.tolist() for part in (first, second)]
    assert numbers[0] + numbers[1] == kept(blanks)
    assert all(number < until for number in numbers[0])
    assert all(number >= until for number in numbers[1])
    assert log.take() is None


def test_a_long_utterance_is_not_kept_and_the_next_one_is() -> None:
    log = FrameLog(SYMBOLS)
    for _ in range(2):
        log.add(frames_of([False] * MAX_FRAMES).reshape(-1))
    assert log.take() is None
    log.add(frames_of([False] * 3).reshape(-1))
    found = log.take()
    assert found is not None
    assert found.frame_T.tolist() == [2 * MAX_FRAMES + each for each in range(3)]


def test_a_new_signal_counts_from_its_beginning() -> None:
    log = FrameLog(SYMBOLS)
    log.add(frames_of([False, True]).reshape(-1))
    log.clear()
    log.add(frames_of([True, False]).reshape(-1))
    found = log.take()
    assert found is not None
    assert found.frame_T.tolist() == [0, 1]


def frames_saying(symbols: list[int], symbol_count: int = SYMBOLS) -> Array:
    """Frames of which each says a symbol; a blank is one for sure."""
    probability_TV = np.full((len(symbols), symbol_count), 1e-5, np.float32)
    probability_TV[np.arange(len(symbols)), symbols] = 1 - 1e-5 * (symbol_count - 1)
    return np.log(probability_TV)


def test_an_utterance_that_is_not_kept_carries_no_symbol_into_the_next() -> None:
    log = FrameLog(SYMBOLS)
    log.add(frames_saying([2, 2]).reshape(-1))
    assert log.take() is not None
    log.add(frames_saying([1, 3] * MAX_FRAMES + [0]).reshape(-1))
    assert log.take() is None
    log.add(frames_saying([0, 0, 2, 0]).reshape(-1))
    found = log.take()
    assert found is not None
    # The letter is its own, not one that goes on from two utterances before.
    assert found.log_probability_TV.argmax(1).tolist() == [0, 2, 0]
    first = 2 + 2 * MAX_FRAMES + 1
    assert found.frame_T.tolist() == [first, first + 2, first + 3]


def test_an_utterance_without_frames_carries_the_symbol_before_it() -> None:
    log = FrameLog(SYMBOLS)
    log.add(frames_saying([2, 2]).reshape(-1))
    assert log.take() is not None
    assert log.take() is None
    log.add(frames_saying([2, 0, 2]).reshape(-1))
    found = log.take()
    assert found is not None
    assert found.log_probability_TV.argmax(1).tolist() == [0, 0, 2]


@given(st.lists(st.integers(0, SYMBOLS - 1), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 7))
def test_the_utterance_behind_an_overlong_one_is_whole(symbols: list[int], until: int, size: int) -> None:
    # The first utterance ends within the last result; with and without too many frames before that.
    tail = frames_saying(symbols)
    behind: list[list[tuple[int, list[float]]]] = []
    for length in (size, MAX_FRAMES + size):
        log = FrameLog(SYMBOLS)
        log.add(frames_saying([1, 3] * length).reshape(-1))
        log.add(tail.reshape(-1))
        assert (log.take(2 * length + until) is None) == (2 * length > MAX_FRAMES)
        log.add(frames_saying([0, 2]).reshape(-1))
        found = log.take()
        assert found is not None
        numbers = (found.frame_T - 2 * length).tolist()
        behind.append(list(zip(numbers, found.log_probability_TV.tolist(), strict=True)))
    assert behind[0] == behind[1]


def test_many_symbols_keep_fewer_frames() -> None:
    symbols = 5_000
    frames_TV = np.full((1, symbols), -1.0, np.float32)
    log = FrameLog(symbols)
    for _ in range(MAX_BYTES // (2 * symbols)):
        log.add(frames_TV.reshape(-1))
    found = log.take()
    assert found is not None
    assert found.log_probability_TV.nbytes <= MAX_BYTES
    for _ in range(MAX_BYTES // (2 * symbols) + 1):
        log.add(frames_TV.reshape(-1))
    assert log.take() is None


def test_an_utterance_whose_first_frames_are_gone_is_not_decoded() -> None:
    log = FrameLog(SYMBOLS)
    log.add(frames_saying([1, 3] * MAX_FRAMES).reshape(-1))
    log.add(frames_saying([1, 3]).reshape(-1))
    # The application ends it before its last result; so the next one began among the frames that were not kept.
    for until in (2 * MAX_FRAMES - 2, 2 * MAX_FRAMES - 1):
        assert log.take(until) is None
    log.add(frames_saying([0, 2]).reshape(-1))
    assert log.take() is None
    log.add(frames_saying([3]).reshape(-1))
    assert log.take() is not None
