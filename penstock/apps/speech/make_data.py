"""Make sentences spoken by synthesizers: `python -m penstock.apps.speech.make_data FOLDER`.

The sentences are the examples of WordNet (Debian: wordnet-base), the voices those of espeak-ng, flite and festival, as
many as are installed. A voice and a sentence belong to one split. Each sentence is a FLAC file at 16 kHz, and
`train.jsonl` and `validation.jsonl` are manifests that `penstock.apps.speech.corpora.json_lines` reads. Nobody's voice
was recorded.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.apps.keywords.make_data import ACCENTS, PITCH, SPEED_WPM, VOICES
from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.recipe import spelled, words_of
from penstock.core.errors import PenstockError, TrainError
from penstock.core.spec import Array

WORDNET = Path("/usr/share/wordnet")
WORDS = 3, 20
SHARE_HELD_OUT = 0.1
FLITE_VOICES = {"train": ("kal16", "awb", "slt"), "validation": ("rms",)}
# Of the duration that a voice takes by itself.
STRETCH = 0.85, 1.25
PEAK_DB = -12.0, -3.0
TIMEOUT_S = 60
SPLITS = ("train", "validation")

# `speak(text, rng)` returns a WAV.
Speak = Callable[[str, np.random.Generator], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Voice:
    """A voice of a synthesizer.

    Args:
        name: Its name, of the synthesizer and of the voice.
        speak: Speaks a text, with the speed and pitch that it draws.
    """

    name: str
    speak: Speak


def sentences(folder: Path = WORDNET) -> list[str]:
    """Read the examples of WordNet's glosses that have 3 to 20 words, all of letters, each once, in order.

    Raises:
        TrainError: WordNet is not there.
    """
    found: dict[str, None] = {}
    for file in sorted(folder.glob("data.*")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            for example in re.findall(r'"([^"]+)"', line.partition("| ")[2]):
                try:
                    words = words_of(spelled([example])[0].tolist())
                except TrainError:
                    continue
                if WORDS[0] <= len(words) <= WORDS[1]:
                    found[" ".join(words)] = None
    if not found:
        raise TrainError(
            f"{folder} has no files data.* of WordNet; install wordnet-base, or name its folder by --wordnet."
        )
    return list(found)


def installed_voices(split: str) -> list[Voice]:
    """List the voices of a split whose synthesizer is installed: espeak-ng, flite and festival."""
    voices: list[Voice] = []
    if shutil.which("espeak-ng"):
        voices += [Voice(name=f"espeak-{name}", speak=partial(_espeak, name)) for name in VOICES[split]]
    if shutil.which("flite"):
        voices += [Voice(name=f"flite-{name}", speak=partial(_flite, name)) for name in FLITE_VOICES[split]]
    if split == "train" and shutil.which("text2wave"):
        voices.append(Voice(name="festival", speak=_festival))
    return voices


def _espeak(voice: str, text: str, rng: np.random.Generator) -> bytes:
    accent = ACCENTS[int(rng.integers(len(ACCENTS)))]
    speed, pitch = rng.integers(*SPEED_WPM, endpoint=True), rng.integers(*PITCH, endpoint=True)
    return _run(["espeak-ng", "-v", f"{accent}+{voice}", "-s", str(speed), "-p", str(pitch), "--stdout", text])


def _flite(voice: str, text: str, rng: np.random.Generator) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.wav"
        stretch = f"duration_stretch={rng.uniform(*STRETCH):.3f}"
        _run(["flite", "-voice", voice, "--setf", stretch, "-t", text, "-o", str(file)])
        return file.read_bytes()


def _festival(text: str, rng: np.random.Generator) -> bytes:
    stretch = f"(Parameter.set 'Duration_Stretch {rng.uniform(*STRETCH):.3f})"
    return _run(["text2wave", "-eval", stretch], text)


def _run(command: list[str], text: str | None = None) -> bytes:
    try:
        done = subprocess.run(
            command,
            input=None if text is None else text.encode(),
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TrainError(f"{command[0]} cannot speak: {error}") from None
    return done.stdout


def spoken(voice: Voice, text: str, rng: np.random.Generator) -> Array:
    """Speak a text at some speed, pitch and level, int16 `[samples]` at 16 kHz.

    Raises:
        TrainError: The synthesizer fails, or says nothing.
    """
    import soundfile
    import soxr

    wave = voice.speak(text, rng)
    try:
        samples, rate_hz = soundfile.read(io.BytesIO(wave), dtype="float64")
    except soundfile.LibsndfileError as error:
        raise TrainError(f"{voice.name} gave no sound for {text!r}: {error}") from None
    samples = soxr.resample(samples, rate_hz, RATE_HZ)
    peak = np.abs(samples).max(initial=0.0)
    if not peak:
        raise TrainError(f"{voice.name} says nothing for {text!r}.")
    return np.round(samples * (32_767 * 10 ** (rng.uniform(*PEAK_DB) / 20) / peak)).astype(np.int16)


def make(folder: Path, texts: Sequence[str], *, seed: int, say: Callable[[str], None]) -> None:
    """Write sentences and their manifests.

    Args:
        folder: Its folder; manifests there are replaced.
        texts: The sentences; a tenth is spoken by the voices of the validation.
        seed: Random seed of the voices, speeds, pitches and levels.
        say: Called with a sentence for each split.

    Raises:
        TrainError: No synthesizer is installed, or one fails.
    """
    voices = {split: installed_voices(split) for split in SPLITS}
    if not all(voices.values()):
        raise TrainError("no synthesizer is installed; install espeak-ng, and flite and festival for more voices.")
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out = max(1, round(SHARE_HELD_OUT * len(texts)))
    parts = {"validation": order[:held_out], "train": order[held_out:]}
    for split, numbers in parts.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        write = partial(_write, folder, split, texts, voices[split], seed)
        with ThreadPoolExecutor() as pool:
            rows = list(pool.map(write, numbers.tolist()))
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        hours = sum(float(row["duration"]) for row in rows) / 3600
        say(f"{split}: {len(rows)} sentences of {len(voices[split])} voices, {hours:.2f} h")


def _write(
    folder: Path, split: str, texts: Sequence[str], voices: Sequence[Voice], seed: int, number: int
) -> dict[str, str | float]:
    import soundfile

    rng = np.random.default_rng([seed, number])
    voice = voices[int(rng.integers(len(voices)))]
    samples = spoken(voice, texts[number], rng)
    name = f"{split}/{number:06d}.flac"
    soundfile.write(folder / name, samples, RATE_HZ)
    return {
        "audio_filepath": name,
        "text": texts[number],
        "duration": round(len(samples) / RATE_HZ, 3),
        "voice": voice.name,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make the data, and say how much."""
    parser = argparse.ArgumentParser(prog="python -m penstock.apps.speech.make_data", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentences", type=int, help="so many of them; all by default")
    parser.add_argument("--wordnet", type=Path, default=WORDNET, help="folder of WordNet's files")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(argv)
    if parsed.sentences is not None and parsed.sentences < 2:
        parser.error("--sentences must be 2 or more: one to learn, and one held out.")
    try:
        texts = sentences(parsed.wordnet)
        chosen = np.random.default_rng(parsed.seed).permutation(len(texts))[: parsed.sentences]
        make(parsed.folder, [texts[number] for number in chosen], seed=parsed.seed, say=print)
    except (PenstockError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
