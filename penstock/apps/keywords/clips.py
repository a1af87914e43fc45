"""The recorded words of data/, and signals composed of a few words of one voice with pauses."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.apps.keywords.app import RATE_HZ, SYMBOLS
from penstock.core.errors import TrainError
from penstock.core.spec import Array

# n signals, T samples of a signal, L words of a signal at most

DATA = Path(__file__).parent / "data"
# 40 chunks.
SIGNAL = 51_200
MAX_WORDS = 8
# The share of signals without a word.
WORDLESS = 0.08
# Before the first word and between words; the longest is drawn for each signal.
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.1, 0.8
# After the last word, so that its end is within the signal.
REST_S = 0.3
# Peak level of a signal relative to full scale, and the signal-to-noise ratio.
PEAK_DB = -36.0, -3.0
SIGNAL_TO_NOISE_DB = 15.0, 40.0
NOISE_TAPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A word spoken by one voice.

    Args:
        symbol: Its index in `SYMBOLS`.
        samples: int16 `[samples]` at 16 kHz.
    """

    symbol: int
    samples: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Composed signals.

    Args:
        samples: int16 `[n, T]`.
        symbols: int64 `[n, L]`, the words in order, padded with zeros.
        ends: int64 `[n, L]`, the sample at which each word ends.
    """

    samples: Array
    symbols: Array
    ends: Array


def read_clips(split: str, folder: Path = DATA) -> dict[str, list[Clip]]:
    """Read the words of every voice of a split: `"train"`, `"validation"` or `"test"`."""
    import soundfile

    if not (folder / "index.csv").exists():
        raise TrainError("the spoken words are not installed; pip install 'penstock-nn[apps]'.")
    clips: dict[str, list[Clip]] = {}
    sounds: dict[str, Array] = {}
    with (folder / "index.csv").open(newline="") as source:
        for row in csv.DictReader(source):
            if row["split"] != split:
                continue
            voice = row["voice"]
            if voice not in sounds:
                sounds[voice], rate_hz = soundfile.read(folder / f"{voice}.flac", dtype="int16")
                assert rate_hz == RATE_HZ, (voice, rate_hz)
            samples = sounds[voice][int(row["begin"]) : int(row["end"])]
            clips.setdefault(voice, []).append(Clip(symbol=SYMBOLS.index(row["word"]), samples=samples))
    return clips


def compose(clips: dict[str, list[Clip]], each: int, *, seed: int, room: int = SIGNAL, noisy: bool) -> Signals:
    """Compose signals of a few words, or none, of one voice.

    Args:
        clips: The words of each voice.
        each: Signals per voice.
        seed: Random seed of words, positions, levels and noise.
        room: Samples in which the words lie; silence follows.
        noisy: Vary level and noise from signal to signal; otherwise only the clips are used.
    """
    rng = np.random.default_rng(seed)
    count = each * len(clips)
    samples = np.zeros((count, SIGNAL), np.int16)
    symbols, ends = np.zeros((2, count, MAX_WORDS), np.int64)
    voices = [voice for voice in clips.values() for _ in range(each)]
    for n, voice in enumerate(voices):
        at = 0
        longest_s = rng.uniform(*LONGEST_PAUSE_S)
        for word in range(0 if rng.random() < WORDLESS else MAX_WORDS):
            clip = voice[rng.integers(len(voice))]
            at += round(rng.uniform(SHORTEST_PAUSE_S, longest_s) * RATE_HZ)
            end = at + len(clip.samples)
            if end > room - REST_S * RATE_HZ:
                break
            samples[n, at:end] = clip.samples
            symbols[n, word], ends[n, word] = clip.symbol, end
            at = end
        if noisy:
            samples[n] = _in_a_room(samples[n], rng)
    return Signals(samples=samples, symbols=symbols, ends=ends)


def _in_a_room(sound_T: Array, rng: np.random.Generator) -> Array:
    noise_T = np.convolve(rng.normal(size=SIGNAL), rng.normal(size=NOISE_TAPS), "same")
    below_db, peak_db = rng.uniform(*SIGNAL_TO_NOISE_DB), rng.uniform(*PEAK_DB)
    # The level of the words; a fixed one for a signal without words.
    spoken = sound_T[sound_T != 0].astype(np.float64)
    level = spoken.std() if spoken.size else 200.0
    mixed_T = sound_T + noise_T * (level / noise_T.std() * 10 ** (-below_db / 20))
    return np.round(mixed_T * (32_767 * 10 ** (peak_db / 20) / np.abs(mixed_T).max())).astype(np.int16)
