"""Word error of a recogniser of any words, on sounds that `make_test_sounds` made."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.acceptance.figures import Repetitions
from penstock.apps.keywords.recipe import collapsed, error_rate
from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.corpora import json_lines
from penstock.apps.speech.recipe import words_of
from penstock.core.errors import BenchError
from penstock.runtime.load import load

# T samples of a signal, U frames, V symbols

# Behind each signal, so that its last word is complete.
REST = RATE_HZ // 2
# Of the same prompts, as they were measured before.
POCKETSPHINX, WHISPER = 0.266, 0.043


def wer_seen_engines(bundle: Path, sounds: Path) -> Repetitions:
    """Return the word error on other voices of the synthesizers of the training."""
    return _error(bundle, sounds, "seen")


def wer_new_engine(bundle: Path, sounds: Path) -> Repetitions:
    """Return the word error on Kokoro's voices or on Piper's, the larger one."""
    kokoro, joe = (_error(bundle, sounds, name) for name in ("kokoro", "joe"))
    worse = max(kokoro, joe, key=lambda one: one.values)
    return Repetitions(worse.values, f"Kokoro {kokoro.values[0]:.3f}, Joe {joe.values[0]:.3f}; {worse.note}")


def wer_human(bundle: Path, sounds: Path) -> Repetitions:
    """Return the word error on the prompts of a telephone system."""
    return _error(bundle, sounds, "asterisk")


def transcripts(bundle: Path, sounds: Path, name: str) -> list[tuple[list[str], list[str]]]:
    """Recognise the signals of a set, greedily.

    Args:
        bundle: The recogniser.
        sounds: The folder of the sets.
        name: The set.

    Returns:
        The recognised and the spoken words of each signal.

    Raises:
        BenchError: The set is not there.
    """
    manifest = sounds / f"{name}.jsonl"
    if not manifest.is_file():
        raise BenchError(
            f"{sounds} has no {name}.jsonl; make it by 'python -m benchmarks.acceptance.speech.make_test_sounds "
            f"{sounds}'."
        )
    import soundfile

    network, device = _network(bundle)
    found: list[tuple[list[str], list[str]]] = []
    for utterance in json_lines(manifest):
        sound_T, rate_hz = soundfile.read(utterance.file, dtype="int16")
        assert rate_hz == RATE_HZ, (utterance.file, rate_hz)
        padded_T = np.pad(sound_T, (0, REST))
        with torch.inference_mode():
            symbols_U = network(torch.from_numpy(padded_T)[None].to(device))[0].argmax(1).tolist()
        found.append((words_of(collapsed(symbols_U)), utterance.text.split()))
    return found


def _error(bundle: Path, sounds: Path, name: str) -> Repetitions:
    pairs = transcripts(bundle, sounds, name)
    heard, spoken = zip(*pairs, strict=True)
    words = sum(map(len, spoken))
    return Repetitions([error_rate(heard, spoken)], f"{len(pairs)} signals, {words:,} words")


@cache
def _network(bundle: Path) -> tuple[Any, torch.device]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load(bundle).module.to(device).eval(), device
