"""Voices of the installed synthesizers, each speaker at many sizes, speeds and pitches.

espeak-ng makes its voices by rules; those of flite, festival, SVOX Pico, MBROLA and RHVoice were made from recordings
of a few speakers. espeak-ng drives MBROLA; some voices of MBROLA and RHVoice are of speakers of other languages, who
have an accent in English. Resampling changes the size of a speaker: pitch and formants together.
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.apps.keywords.make_data import ACCENTS, VOICES
from penstock.apps.speech.app import RATE_HZ
from penstock.core.errors import TrainError
from penstock.core.spec import Array

# Words a minute and pitch of espeak-ng, from 0 to 99.
SPEED_WPM = 120, 230
PITCH = 15, 85
FLITE = {"train": ("awb", "rms", "slt"), "validation": (), "test": ("kal16",)}
FESTIVAL = {
    "train": ("ked_diphone", "rab_diphone", "cmu_us_slt_arctic_hts"),
    "validation": (),
    "test": ("kal_diphone",),
}
PICO = {"train": ("en-US", "en-GB"), "validation": (), "test": ()}
MBROLA = {"train": ("us1", "us2", "us3", "en1"), "validation": (), "test": ()}
# Speakers of other languages whom Whisper understands: a word error below 0.5, where the native ones have 0.25 to 0.33.
MBROLA_ACCENTED = {
    "train": ("de1", "de2", "de3", "de4", "de5", "de6", "fr1", "fr4", "hu1", "nl2", "ro1", "sw1"),
    "validation": (),
    "test": (),
}
# The speakers of alan and slt are those of flite's awb and slt, so that they are in the same split.
RHVOICE = {"train": ("alan", "bdl", "clb", "slt"), "validation": (), "test": ()}
RHVOICE_ACCENTED = {"train": ("evgeniy-eng", "lyubov"), "validation": (), "test": ()}
RHVOICE_LIBRARY = "libRHVoice.so.5"
# At the same number of words a minute, MBROLA speaks a quarter faster than espeak-ng.
MBROLA_WPM = 90, 170
# Of the duration that a voice takes by itself.
STRETCH = 0.8, 1.25
# Speed and pitch of SVOX Pico, in percent.
PICO_SPEED, PICO_PITCH = (80, 125), (80, 125)
# Of the rate and the pitch that a voice has by itself.
RHVOICE_RATE, RHVOICE_PITCH = (0.8, 1.3), (0.8, 1.25)
# Sizes of a speaker: espeak-ng's variants have sizes of their own.
SIZES = {
    "espeak": (0.92, 1.08),
    "flite": (0.84, 1.22),
    "festival": (0.84, 1.22),
    "pico": (0.8, 1.15),
    "mbrola": (0.84, 1.22),
    "mbrola-accented": (0.84, 1.22),
    "rhvoice": (0.84, 1.22),
    "rhvoice-accented": (0.84, 1.22),
}
# Shares of the sound; those of synthesizers that are not installed go to the others.
SHARES = {
    "espeak": 0.15,
    "flite": 0.15,
    "festival": 0.1,
    "pico": 0.15,
    "mbrola": 0.16,
    "mbrola-accented": 0.08,
    "rhvoice": 0.16,
    "rhvoice-accented": 0.05,
}
TIMEOUT_S = 120
# Where a sound exceeds this share of its peak it is no silence.
QUIET = 0.01
MARGIN_S = 0.03
TRIED = "this is a voice"

# `speak(texts, rng)` yields a WAV for each text.
SpeakAll = Callable[[Sequence[str], np.random.Generator], Iterator[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """A voice of a synthesizer that speaks several texts at once.

    Args:
        synthesizer: One of `SHARES`. Native voices of MBROLA and RHVoice and those with an accent have shares of
            their own.
        name: The synthesizer's name of the voice.
        speak: Speaks texts, with a speed and pitch that it draws for each.
    """

    synthesizer: str
    name: str
    speak: SpeakAll

    def sounds(self, texts: Sequence[str], rng: np.random.Generator) -> Iterator[Array]:
        """Speak texts at a size of the speaker drawn for each, float32 `[samples]` at 16 kHz with peak 1.

        Silence at both ends is cut. A text that the voice does not speak is an empty array.

        Raises:
            TrainError: The synthesizer fails.
        """
        import soundfile
        import soxr

        for wave in self.speak(texts, rng):
            size = rng.uniform(*SIZES[self.synthesizer])
            try:
                sound_T, rate_hz = soundfile.read(io.BytesIO(wave), dtype="float32")
            except soundfile.LibsndfileError:
                sound_T, rate_hz = np.zeros(0, np.float32), RATE_HZ
            yield trimmed(soxr.resample(sound_T, rate_hz * size, RATE_HZ))


def trimmed(sound_T: Array) -> Array:
    """Cut the silence at both ends and bring the peak to 1."""
    size_T = np.abs(sound_T)
    peak = size_T.max(initial=0.0)
    if not peak:
        return sound_T[:0]
    loud = np.flatnonzero(size_T > QUIET * peak)
    margin = round(MARGIN_S * RATE_HZ)
    return sound_T[max(0, loud[0] - margin) : loud[-1] + margin] / peak


def speakers(split: str) -> list[Speaker]:
    """List the voices of a split, `"train"`, `"validation"` or `"test"`, whose synthesizer is installed and speaks."""
    found: list[Speaker] = []
    if shutil.which("espeak-ng"):
        found += [Speaker(synthesizer="espeak", name=name, speak=partial(_espeak, name)) for name in VOICES[split]]
    if shutil.which("flite"):
        found += [Speaker(synthesizer="flite", name=name, speak=partial(_flite, name)) for name in FLITE[split]]
    if shutil.which("festival"):
        found += [
            Speaker(synthesizer="festival", name=name, speak=partial(_festival, name)) for name in FESTIVAL[split]
        ]
    if shutil.which("pico2wave"):
        found += [Speaker(synthesizer="pico", name=name, speak=partial(_pico, name)) for name in PICO[split]]
    if shutil.which("espeak-ng") and shutil.which("mbrola"):
        found += [
            Speaker(synthesizer="mbrola", name=name, speak=partial(_mbrola, f"mb-{name}")) for name in MBROLA[split]
        ]
        found += [
            Speaker(synthesizer="mbrola-accented", name=name, speak=partial(_mbrola, f"mb-{name}-en"))
            for name in MBROLA_ACCENTED[split]
        ]
    found += [Speaker(synthesizer="rhvoice", name=name, speak=partial(_rhvoice, name)) for name in RHVOICE[split]]
    found += [
        Speaker(synthesizer="rhvoice-accented", name=name, speak=partial(_rhvoice, name))
        for name in RHVOICE_ACCENTED[split]
    ]
    return [speaker for speaker in found if _speaks(speaker)]


def chosen(among: Sequence[Speaker], rng: np.random.Generator) -> Speaker:
    """Draw a synthesizer by its share, then one of its voices."""
    installed = sorted({speaker.synthesizer for speaker in among})
    shares = np.array([SHARES[name] for name in installed])
    synthesizer = installed[int(rng.choice(len(installed), p=shares / shares.sum()))]
    own = [speaker for speaker in among if speaker.synthesizer == synthesizer]
    return own[int(rng.integers(len(own)))]


def _speaks(speaker: Speaker) -> bool:
    """Try a voice: that of a package that is not installed says nothing, or fails."""
    rng = np.random.default_rng(0)
    try:
        return all(len(sound_T) for sound_T in speaker.sounds([TRIED], rng))
    except TrainError:
        return False


def _espeak(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    for text in texts:
        accent = ACCENTS[int(rng.integers(len(ACCENTS)))]
        speed, pitch = rng.integers(*SPEED_WPM, endpoint=True), rng.integers(*PITCH, endpoint=True)
        yield _run(["espeak-ng", "-v", f"{accent}+{voice}", "-s", str(speed), "-p", str(pitch), "--stdout", text])


def _mbrola(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    for text in texts:
        speed, pitch = rng.integers(*MBROLA_WPM, endpoint=True), rng.integers(*PITCH, endpoint=True)
        yield _run(["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text])


def _flite(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.wav"
        for text in texts:
            stretch = f"duration_stretch={rng.uniform(*STRETCH):.3f}"
            yield _run_into(file, ["flite", "-voice", voice, "--setf", stretch, "-t", text, "-o", str(file)])


def _festival(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    # Its start takes longer than a sentence.
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"(voice_{voice})"]
        for number, text in enumerate(texts):
            lines.append(f"(Parameter.set 'Duration_Stretch {rng.uniform(*STRETCH):.3f})")
            quoted = text.replace("\\", " ").replace('"', " ")
            spoken = f"(utt.synth (eval (list 'Utterance 'Text \"{quoted}\")))"
            lines.append(f'(utt.save.wave {spoken} "{folder}/{number}.wav" \'riff)')
        script = Path(folder) / "speak.scm"
        script.write_text("\n".join(lines) + "\n")
        _run(["festival", "--batch", str(script)])
        yield from _numbered(Path(folder), len(texts))


def _pico(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.wav"
        for text in texts:
            speed, pitch = rng.integers(*PICO_SPEED, endpoint=True), rng.integers(*PICO_PITCH, endpoint=True)
            marked = f"<speed level='{speed}'><pitch level='{pitch}'>{text}</pitch></speed>"
            yield _run_into(file, ["pico2wave", "-l", voice, "-w", str(file), marked])


def _rhvoice(voice: str, texts: Sequence[str], rng: np.random.Generator) -> Iterator[bytes]:
    # Its start takes longer than a sentence.
    program = Path(__file__).with_name("rhvoice.py")
    said = [(rng.uniform(*RHVOICE_RATE), rng.uniform(*RHVOICE_PITCH), text) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-IS", str(program), RHVOICE_LIBRARY, voice, folder], json.dumps(said))
        yield from _numbered(Path(folder), len(texts))


def _numbered(folder: Path, count: int) -> Iterator[bytes]:
    """Read the sounds of texts, which are empty where there is no file."""
    for number in range(count):
        file = folder / f"{number}.wav"
        yield file.read_bytes() if file.exists() else b""


def _run_into(file: Path, command: list[str]) -> bytes:
    """Run a command that writes a file; return its content, which is empty if it wrote none."""
    file.unlink(missing_ok=True)
    _run(command)
    return file.read_bytes() if file.exists() else b""


def _run(command: list[str], given: str = "") -> bytes:
    """Run a command with its standard input; return its standard output."""
    try:
        done = subprocess.run(command, input=given.encode(), capture_output=True, check=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise TrainError(f"{command[0]} cannot speak: {error}") from None
    return done.stdout
