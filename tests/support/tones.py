"""A live application that recognises words by the pitch of tones, and a voice that speaks them."""

import io
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soxr

from penstock.core.source_files.find_application import find_application
from penstock.core.speech.sound import Samples
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import make_network
from tests.support.live import sounds

RATE_HZ = 8000
WORD_S, GAP_S = 0.2, 0.1
# Pitch of each word.
PITCH_HZ = {"alpha": 400.0, "bravo": 1_000.0, "charlie": 1_800.0, "delta": 3_200.0}

# The text of a word comes in two parts: where it begins, and when it is over. After half a second of silence the
# application ends the utterance.
TONES_PY = """
from penstock import Application, Live, Speech, TensorSpec, Word

FRAME_S = 0.02
WORDS = {1: "alpha", 3: "bravo", 5: "charlie", 7: "delta"}
LOUD, PAUSE = 4.0, 25


def net():
    from penstock.nn import LogMel, Sequential

    return Sequential(LogMel(8000, bands=8, hop_ms=20))


def events(output_U, memory, last):
    frames, band, start, quiet, said = memory or [0, -1, 0, 0, False]
    delta, words, final = "", [], False
    for bands in output_U:
        now = int(bands.argmax()) if bands.max() > LOUD else -1
        now = now if now in WORDS else -1
        if band >= 0 and now != band:
            word = WORDS[band]
            delta += word[2:]
            words.append([word, start * FRAME_S, frames * FRAME_S])
            said = True
        if now >= 0 and now != band:
            delta += (" " if said else "") + WORDS[now][:2]
            start = frames
        quiet = 0 if now >= 0 else quiet + 1
        band, frames = now, frames + 1
    if last and band >= 0:
        word = WORDS[band]
        delta, band = delta + word[2:], -1
        words.append([word, start * FRAME_S, frames * FRAME_S])
        said = True
    if said and (quiet >= PAUSE or last):
        final, said = True, False
    event = {"delta": delta, "words": words, "final": final}
    return event if delta or words or final else None, [frames, band, start, quiet, said]


def speech(event):
    words = [Word(text=word, start_s=start_s, end_s=end_s, probability=0.9) for word, start_s, end_s in event["words"]]
    return Speech(delta=event["delta"], words=words, final=event["final"])


app = Application(
    name="tones",
    description="Recognises words by their pitch.",
    input=TensorSpec(dtype="int16", shape=(320,), meaning="sound", units="int16 PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(2, 8), meaning="loudness of each band", name="bands"),
    live=Live(rate_hz=8000, events=events, speech=speech),
    chunks=4,
    max_body_bytes=2_000_000,
    model=net,
)
"""


def tones_bundle(folder: Path, text: str = TONES_PY) -> Path:
    """Write its bundle into a folder."""
    (folder / "tones_app.py").write_text(text)
    found = find_application(str(folder / "tones_app.py"))
    Bundle.write(found, make_network(found), sounds(), to=folder / "bundle")
    return folder / "bundle"


def silence(seconds: float, rate_hz: int = RATE_HZ) -> Samples:
    """So much silence."""
    return np.zeros(round(seconds * rate_hz), np.int16)


def spoken(*words: str, rate_hz: int = RATE_HZ, gap_s: float = GAP_S) -> Samples:
    """Words one after the other, with a gap after each."""
    time_s = np.arange(round(WORD_S * RATE_HZ)) / RATE_HZ
    parts: list[Samples] = []
    for word in words:
        tone_T = 12_000 * np.sin(2 * np.pi * PITCH_HZ[word] * time_s)
        parts += [tone_T.astype(np.int16), silence(gap_s)]
    sound_T = np.concatenate([silence(GAP_S), *parts])
    if rate_hz == RATE_HZ:
        return sound_T
    return soxr.resample(sound_T, RATE_HZ, rate_hz).astype(np.int16)


def wav(sound_T: Samples, rate_hz: int = RATE_HZ) -> bytes:
    """A WAV of a sound."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(sound_T.astype("<i2").tobytes())
    return file.getvalue()


def pieces(sound_T: Samples, size: int) -> Sequence[bytes]:
    """Its bytes in pieces of so many samples."""
    return [sound_T[at : at + size].tobytes() for at in range(0, len(sound_T), size)]
