"""The recogniser that two cores train: word error, the same text in any chunks, the delay of a word."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.acceptance.train.training_run import trained
from penstock.apps.keywords.app import SYMBOLS as WORDS
from penstock.apps.keywords.clips import Signals
from penstock.apps.keywords.recipe import collapsed, spoken_signals
from penstock.apps.speech.app import CHUNK, FRAME_S, LOOKAHEAD, RATE_HZ, SYMBOLS
from penstock.apps.speech.recipe import SIGNALS_PER_VOICE, spelled, word_error, words_of
from penstock.core.spec import Array
from penstock.runtime.executor import Executor
from penstock.runtime.load import load, streaming_executor
from penstock.runtime.whole_signals import run_in_chunks

# n signals, T samples of a signal, U frames, V symbols

# Ten minutes of two cores.
TRAIN_CPU_S = 1_200
ROWS = 64
CHUNKS = (CHUNK, 997, 320, 160)

_kept = ExitStack()


def tiny_wer() -> list[float]:
    """Return the word error on voices that are never learned from or chosen by, streamed in chunks of 80 ms."""
    signals = _spoken()
    outputs_nUV = run_in_chunks(_executor(), signals.samples)
    return [word_error(torch.from_numpy(outputs_nUV), torch.from_numpy(spelled(_texts(signals))))]


def streaming_difference() -> list[float]:
    """Return the number of transcripts that another division into chunks changes."""
    samples_nT = _spoken().samples
    with torch.inference_mode():
        whole_nUV = load(_bundle()).module(torch.from_numpy(samples_nT)).numpy()
    differ = np.zeros(len(samples_nT), np.bool_)
    for chunk in CHUNKS:
        streamed_nUV = run_in_chunks(_executor(), samples_nT, chunk)
        differ |= [_text(one) != _text(other) for one, other in zip(streamed_nUV, whole_nUV, strict=True)]
    return [float(differ.sum())]


def word_delay_ms() -> list[float]:
    """Return the median time from a word's last sample to the chunk that brings its last character, in milliseconds.

    The chunk's own length counts, and the lookahead; the server's time does not.
    """
    signals = _spoken()
    outputs_nUV = run_in_chunks(_executor(), signals.samples)
    delays_ms: list[float] = []
    for words, ends, output_UV in zip(signals.symbols, signals.ends, outputs_nUV, strict=True):
        count = int(np.count_nonzero(words))
        heard = _last_frames(output_UV)
        if [word for word, _ in heard] != [WORDS[word] for word in words[:count]]:
            continue
        for (_, frame), end in zip(heard, ends, strict=False):
            # A frame is there when the frames after it and the rest of its chunk are.
            known_T = (frame + 1 + LOOKAHEAD) * FRAME_S * RATE_HZ
            delays_ms.append((np.ceil(known_T / CHUNK) * CHUNK - end) / RATE_HZ * 1e3)
    return [float(np.median(delays_ms))]


def _last_frames(output_UV: Array) -> list[tuple[str, int]]:
    """Words, and the frame in which the last character of each is told."""
    words: list[tuple[str, int]] = []
    before, word = 0, ""
    for frame, symbol in enumerate(output_UV.argmax(1).tolist()):
        if symbol not in (before, 0):
            if SYMBOLS[symbol] == " ":
                word = ""
            else:
                if word:
                    words.pop()
                word += SYMBOLS[symbol]
                words.append((word, frame))
        before = symbol
    return words


def _text(output_UV: Array) -> list[str]:
    return words_of(collapsed(output_UV.argmax(1).tolist()))


def _texts(signals: Signals) -> list[str]:
    return [" ".join(WORDS[word] for word in words if word) for words in signals.symbols]


@cache
def _spoken() -> Signals:
    return spoken_signals("test", SIGNALS_PER_VOICE["test"])


@cache
def _bundle() -> Path:
    """Train once for all figures; the run lasts as long as this process."""
    return _kept.enter_context(trained("speech", limit_cpu_s=TRAIN_CPU_S)).bundle


@cache
def _executor() -> Executor:
    predictor = load(_bundle())
    return streaming_executor(predictor.application, predictor.module, slots=ROWS, max_rows=ROWS)
