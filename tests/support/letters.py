"""A live application whose samples name the symbols that are spoken, some of them not clearly."""

from pathlib import Path

import numpy as np

from penstock.core.source_files.find_application import find_application
from penstock.core.speech.sound import Samples
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import make_network

RATE_HZ = 1_000
# What each sample says: a blank, or a symbol for certain, or one of two letters of which the first is likelier.
SAMPLES = {"-": 0, " ": 1, "a": 2, "b": 3, "c": 4, "a|b": 5, "b|c": 6}

# A frame is a sample. The language model has seen "ab" alone, so that it reads "a" and "a|b" as that.
LETTERS_PY = """
import os
from functools import partial

from penstock import Application, EndpointBeam, Live, TensorSpec
from penstock.apps.speech.transcript import revised, spoken, transcribed
from penstock.core.speech.ngram_training import train_ngram

SYMBOLS = ("-", " ", "a", "b", "c")
LIKELY = [{0: 0.9996}, {1: 0.99}, {2: 0.99}, {3: 0.99}, {4: 0.99}, {2: 0.55, 3: 0.43}, {3: 0.55, 4: 0.43}]


def net():
    import torch
    from torch import nn

    from penstock.nn import Sequential

    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            table_NV = torch.full((len(LIKELY), len(SYMBOLS)), 0.0001)
            for number, each in enumerate(LIKELY):
                for symbol, probability in each.items():
                    table_NV[number, symbol] = probability
            self.register_buffer("table_NV", (table_NV / table_NV.sum(1, keepdim=True)).log())

        def forward(self, sample_BT):
            return self.table_NV[sample_BT.long().clamp(0, len(LIKELY) - 1)]

    return Sequential(Names())


def language():
    return train_ngram(["ab", "ab ab", "ab ab ab"], 3, "characters", SYMBOLS[1:])


app = Application(
    name="letters",
    description="Writes the letters that samples name.",
    input=TensorSpec(dtype="int16", shape=(80,), meaning="sound", units="int16 PCM at 1 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(80, 5), meaning="log-probabilities", name="symbols", labels=SYMBOLS),
    live=Live(
        rate_hz=1_000,
        events=partial(transcribed, symbols=SYMBOLS, frame_s=0.001),
        speech=spoken,
        beam=EndpointBeam(frame_s=0.001, revise=revised, language=language, hot_bonus=6.0, max_wait_s=MAX_WAIT_S),
    ),
    chunks=4,
    max_body_bytes=2_000_000,
    model=net,
)
"""


def letters_bundle(folder: Path, max_wait_s: float = 10.0) -> Path:
    """Write its bundle into a folder."""
    (folder / "letters_app.py").write_text(LETTERS_PY.replace("MAX_WAIT_S", str(max_wait_s)))
    found = find_application(str(folder / "letters_app.py"))
    examples = np.stack([said("a b c", rest=75), said("a a|b b|c", rest=75)])
    Bundle.write(found, make_network(found), examples, to=folder / "bundle")
    return folder / "bundle"


def said(text: str, rest: int = 0) -> Samples:
    """The samples of a text whose symbols are separated by spaces; `_` is a space between words.

    Args:
        text: The symbols, each of which lasts two samples, with two samples of blank behind it.
        rest: Samples of silence behind them.
    """
    samples = [SAMPLES[" " if symbol == "_" else symbol] for symbol in text.split()]
    return np.concatenate([np.repeat([[each, 0] for each in samples], 2).ravel(), np.zeros(rest)]).astype(np.int16)
