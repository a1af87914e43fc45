"""A live application that detects loud words, and a voice that speaks some."""

from pathlib import Path

import numpy as np

from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import make_network
from tests.support.live import sounds

LOUD_PY = """
import math

from penstock import Application, Live, TensorSpec

PAUSE = 12  # frames of 20 ms: shorter ones lie within words


def net():
    import torch

    from penstock.nn import LogMel, Sequential

    linear = torch.nn.Linear(8, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.0] * 8, [1 / 8] * 8]))
        linear.bias.copy_(torch.tensor([0.0, 4.0]))
    return Sequential(LogMel(8000, bands=8, hop_ms=20), linear, torch.nn.LogSoftmax(-1))


def events(output_U, memory, last):
    quiet, words = PAUSE if memory is None else memory, []
    for loud in output_U[:, 1].tolist():
        if loud > math.log(0.5) and quiet >= PAUSE:
            words.append({"word": "loud", "probability": round(math.exp(loud), 4)})
        quiet = 0 if loud > math.log(0.5) else quiet + 1
    return {"words": words} if words else None, quiet


app = Application(
    name="loud",
    description="Hears when it gets loud.",
    input=TensorSpec(dtype="int16", shape=(320,), meaning="sound", units="int16 PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(2, 2), meaning="scores", labels=("quiet", "loud"), name="scores"),
    live=Live(rate_hz=8000, events=events),
    chunks=4,
    model=net,
)
"""


def loud_bundle(folder: Path) -> Path:
    """Write its bundle into a folder."""
    (folder / "loud_app.py").write_text(LOUD_PY)
    found = find_application(str(folder / "loud_app.py"))
    Bundle.write(found, make_network(found), sounds(), to=folder / "bundle")
    return folder / "bundle"


LOUDER = 16  # the clips have peaks of 1,023


def write_spoken(file: Path, words: int, *, first_s: float) -> None:
    """Write a WAV of words of a test voice, with pauses between them."""
    import soundfile

    from penstock.apps.keywords.app import RATE_HZ
    from penstock.apps.keywords.clips import read_clips

    pause = np.zeros(RATE_HZ // 2, np.int16)
    parts = [np.zeros(round(first_s * RATE_HZ), np.int16)]
    for clip in read_clips("test")["f2"][:words]:
        parts += [clip.samples * LOUDER, pause]
    soundfile.write(file, np.concatenate(parts), RATE_HZ)
