"""Times of the words of a text in CTC's frames: the most likely path of the text through them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.spec import Array

# T frames, V symbols, S states of a path: a blank before, between and after the symbols


class AlignedWord(NamedTuple):
    """A word in the frames.

    Args:
        symbols: Its symbols.
        begin: Frame of its first symbol.
        end: The frame behind that of its last symbol.
        probability: Geometric mean of its symbols' probabilities, each where it begins.
    """

    symbols: tuple[int, ...]
    begin: int
    end: int
    probability: float


def aligned_words(log_probability_TV: Array, symbols: Sequence[int], space: int) -> list[AlignedWord]:
    """Find the words of a text in its frames, by Viterbi's algorithm.

    Args:
        log_probability_TV: `[T, V]`; the blank is symbol 0.
        symbols: The symbols of the text, which has a path through the frames.
        space: The symbol between words.
    """
    if not symbols:
        return []
    state_T = _best_path(log_probability_TV, symbols, space)
    words: list[AlignedWord] = []
    begin = 0
    for at in (*(index for index, symbol in enumerate(symbols) if symbol == space), len(symbols)):
        frames = [np.flatnonzero(state_T == 2 * index + 1) for index in range(begin, at)]
        if begin < at:
            first = [log_probability_TV[each[0], symbols[begin + index]] for index, each in enumerate(frames)]
            probability = math.exp(min(0.0, float(np.mean(first))))
            word = tuple(symbols[begin:at])
            words.append(AlignedWord(word, int(frames[0][0]), int(frames[-1][-1]) + 1, probability))
        begin = at + 1
    return words


def _best_path(log_probability_TV: Array, symbols: Sequence[int], space: int) -> Array:
    frames, states = len(log_probability_TV), 2 * len(symbols) + 1
    label_S = np.zeros(states, np.intp)
    label_S[1::2] = symbols
    emitted_TS = log_probability_TV[:, label_S].astype(np.float64)
    # Between words, at the beginning and at the end, a space may stand for a blank.
    between = [0, states - 1, *(2 * index + 2 for index, symbol in enumerate(symbols) if symbol == space)]
    either_T = np.maximum(log_probability_TV[:, 0], log_probability_TV[:, space])
    emitted_TS[:, between] = either_T[:, None]
    # A blank is left out between symbols that differ.
    skips_S = np.zeros(states, bool)
    skips_S[3::2] = label_S[3::2] != label_S[1:-2:2]
    score_S = np.full(states, -np.inf)
    score_S[:2] = emitted_TS[0, :2]
    back_TS = np.zeros((frames, states), np.int8)
    came_3S = np.full((3, states), -np.inf)
    for frame in range(1, frames):
        came_3S[0] = score_S
        came_3S[1, 1:] = score_S[:-1]
        came_3S[2, 2:] = np.where(skips_S[2:], score_S[:-2], -np.inf)
        back_S = came_3S.argmax(0)
        back_TS[frame] = back_S
        score_S = came_3S[back_S, np.arange(states)] + emitted_TS[frame]
    state = states - 1 if states < 2 or score_S[-1] >= score_S[-2] else states - 2
    state_T = np.empty(frames, np.intp)
    for frame in range(frames - 1, -1, -1):
        state_T[frame] = state
        state -= int(back_TS[frame, state])
    return state_T
