"""Make the sound in data/ with espeak-ng 1.51: `python -m penstock.apps.keywords.make_data`.

A voice is one of espeak-ng's variants, which change the formants, the pitch, the source of the voice or the way of
synthesis. A voice belongs to one split; variants that share most of their formants (Robosoft 1 to 8, Iven 1 to 4, Mike
and m3 ...) are not spread over two: one of them is taken, or all are in one split. Every word is spoken with an accent,
speed and pitch of its own, drawn with the seed below. Each voice is one FLAC file, its words one behind the other;
index.csv says where each begins and ends. espeak-ng's output is not a work derived from its code; nobody's voice was
recorded.
"""

import csv
import io
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.apps.keywords.app import RATE_HZ, WORDS
from penstock.core.spec import Array

DATA = Path(__file__).parent / "data"
_NAMES = {
    "train": "m1 m2 m5 m6 m7 m8 Nguyen f3 f4 aunty linda belinda Alex Andrea Annie Denis Diogo miguel anika Lee Mario "
    "Michael Tweaky adam benjamin edward antonio boris croak gustave grandpa john kaukovalta max norbert pablo paul "
    "quincy rob robert klatt klatt2 klatt3 klatt4 whisper zac",
    "validation": "m4 f1 grandma Gene sandro travis victor Marco",
    "test": "m3 f2 f5 iven steph david Jacky shelby pedro Andy Alicia ed",
}
VOICES = {split: names.split() for split, names in _NAMES.items()}
# Recordings of each word per voice.
TAKES = {"train": 1, "validation": 1, "test": 2}
ACCENTS = (
    "en-us",
    "en-us-nyc",
    "en-gb",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
)
# Words a minute; espeak-ng's own is 175.
SPEED_WPM = 110, 210
# On espeak-ng's scale, 0 to 99.
PITCH = 20, 80
SEED = 0
# Quiet, so that FLAC stores 11 bits instead of 16.
PEAK = 1023
# A word is trimmed to where it exceeds this share of its peak, plus a margin.
QUIET = 0.02
MARGIN_S = 0.02
INDEX_FIELDS = ("voice", "split", "word", "accent", "speed_wpm", "pitch", "begin", "end")


class Take(NamedTuple):
    """One recording of a word."""

    word: str
    accent: str
    speed_wpm: int
    pitch: int


def takes(voice: str, each: int) -> list[Take]:
    """The recordings of a voice: every word `each` times, the accents in turn."""
    rng = np.random.default_rng([SEED, *voice.encode()])
    accents = [ACCENTS[at % len(ACCENTS)] for at in rng.permutation(each * len(WORDS))]
    return [
        Take(word, accent, int(rng.integers(*SPEED_WPM, endpoint=True)), int(rng.integers(*PITCH, endpoint=True)))
        for word, accent in zip(WORDS * each, accents, strict=True)
    ]


def spoken(voice: str, take: Take) -> Array:
    """Speak a word with espeak-ng and trim its edges, int16 `[samples]` at 16 kHz."""
    import soundfile
    from scipy.signal import resample_poly

    options = ["-v", f"{take.accent}+{voice}", "-s", str(take.speed_wpm), "-p", str(take.pitch), "--stdout"]
    wave = subprocess.run(["espeak-ng", *options, take.word], check=True, capture_output=True).stdout
    samples, rate_hz = soundfile.read(io.BytesIO(wave), dtype="float64")
    samples = resample_poly(samples, RATE_HZ, rate_hz)
    loud = np.flatnonzero(np.abs(samples) > QUIET * np.abs(samples).max())
    margin = round(MARGIN_S * RATE_HZ)
    samples = samples[max(0, loud[0] - margin) : loud[-1] + margin]
    fade = np.minimum(1, np.arange(len(samples)) / (margin / 2))
    samples = samples * fade * fade[::-1]
    return np.round(samples * (PEAK / np.abs(samples).max())).astype(np.int16)


def make(folder: Path, voices: Mapping[str, Sequence[str]]) -> None:
    """Write a FLAC file for each voice, and index.csv."""
    import soundfile

    folder.mkdir(exist_ok=True)
    rows: list[tuple[str | int, ...]] = []
    for voice, split in ((voice, split) for split, names in voices.items() for voice in names):
        planned = takes(voice, TAKES[split])
        clips = [spoken(voice, take) for take in planned]
        ends = np.cumsum([len(clip) for clip in clips])
        for take, clip, end in zip(planned, clips, ends, strict=True):
            rows.append((voice, split, *take, int(end) - len(clip), int(end)))
        soundfile.write(folder / f"{voice}.flac", np.concatenate(clips), RATE_HZ, compression_level=1.0)
    with (folder / "index.csv").open("w", newline="") as sink:
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow(INDEX_FIELDS)
        writer.writerows(rows)


if __name__ == "__main__":
    make(DATA, VOICES)
