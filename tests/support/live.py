"""A live application small enough to bundle in a moment: sound in, two scores a frame out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import make_network

RATE_HZ = 8000
CHUNK = 320

LIVE_PY = """
import torch

from penstock import Application, Live, TensorSpec


def net():
    from penstock.nn import GRU, CausalConv1d, LogMel, Lookahead, Sequential

    torch.manual_seed(5)
    return Sequential(
        LogMel(8000, bands=8),
        CausalConv1d(8, 8, 3, 2),
        GRU(8, 16),
        Lookahead(16, 2),
        torch.nn.Linear(16, 2),
        torch.nn.LogSoftmax(-1),
    )


app = Application(
    name="hark",
    description="Sound in, two scores out.",
    input=TensorSpec(dtype="int16", shape=(320,), meaning="sound", units="int16 PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(4, 2), meaning="scores", labels=("no", "yes"), name="scores"),
    live=Live(rate_hz=8000),
    chunks=4,
    model=net,
)
"""


def sounds(count: int = 3, frames: int = 1000) -> Array:
    """`[count, frames]` of tones with noise."""
    rng = np.random.default_rng(2)
    time_s = np.arange(frames) / RATE_HZ
    tones = np.sin(2 * np.pi * time_s * rng.uniform(100, 1500, (count, 1)))
    return (3000 * tones + rng.normal(0, 300, (count, frames))).astype(np.int16)


def write_live_app(folder: Path, text: str = LIVE_PY) -> Path:
    """Write the application as a user's file."""
    file = folder / "hark_app.py"
    file.write_text(text)
    return file


def live_bundle(folder: Path, **options: Any) -> Bundle:
    """Write its bundle into `folder / "bundle"`."""
    found = find_application(str(write_live_app(folder)))
    return Bundle.write(found, make_network(found), sounds(), to=folder / "bundle", **options)


def new_live_bundle(folders: pytest.TempPathFactory) -> Path:
    """Write its bundle into a folder of its own."""
    folder = folders.mktemp("hark")
    live_bundle(folder)
    return folder / "bundle"


def offline(bundle: Path, sound: Array) -> Array:
    """Outputs of the offline forward pass for whole signals."""
    from penstock.runtime.load import load

    return load(bundle).predict(sound)
