"""Frames of utterances: however they come, the same frames are kept, each in one utterance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.spec import Array
from penstock.core.utterance_decoder import BLANK_LOG_PROBABILITY
from penstock.serve.streams.frame_log import MAX_FRAMES, FrameLog

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
