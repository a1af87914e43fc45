"""An application that answers texts with texts, token by token, and its pack: a small random network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Bundle
from penstock.core.packs.pack import Pack, read_pack
from penstock.core.source_files.find_application import find_application
from penstock.core.texts.learn_subwords import learn_subwords
from penstock.export.pack_writer import export_pack
from tests.support.shared import made_once

TEXTS = ("the cat and the dog", "el año de la niña", "¿un niño?", "the year of the child", "a", "the dog " * 5)
SOURCE = """
from pathlib import Path

from penstock import Application, Dim, Generate, SubwordReply, SubwordText, TensorSpec
from penstock.models.encoder_decoder import EncoderDecoder
from penstock.nn.decoding import Sampled

VOCABULARY = Path(__file__).with_name("words.json")
SIZE = 320
WIDTH, LAYERS, FIRST, END = 32, 2, 1, 2
source, past = Dim("source", max=40), Dim("past", max=40)


def network():
    decoder = EncoderDecoder(
        SIZE, width=WIDTH, heads=4, encoder_layers=LAYERS, decoder_layers=LAYERS, hidden=64, dropout=0.0
    )
    return Sampled(decoder, first=FIRST, end=END)


entries = 2 * LAYERS * WIDTH
number = TensorSpec(dtype="int64", shape=(), meaning="a number")
app = Application(
    name="speaker",
    description="Answers a text with another one.",
    inputs={
        "tokens": TensorSpec(dtype="int64", shape=(source,), meaning="tokens of a text", limits=(0, SIZE - 1)),
        "seed": TensorSpec(dtype="int64", shape=(), meaning="for the choice of tokens", default=4),
    },
    output=TensorSpec(dtype="int64", shape=(), meaning="a token, or 2 for the end", name="token"),
    decode=SubwordText(tensor="tokens", vocabulary=VOCABULARY, max_tokens=40),
    accepts=("text/plain", "application/json"),
    reply=SubwordReply(tensor="token", vocabulary=VOCABULARY),
    model=network,
    generate=Generate(
        state={
            "memory": TensorSpec(dtype="float32", shape=(source, entries), meaning="of the text"),
            "cache": TensorSpec(dtype="float32", shape=(past, entries), meaning="of the answer"),
            "token": number,
            "seed": number,
            "count": number,
        },
        max_steps=36,
    ),
)
"""


def speaker_bundle(folder: Path) -> Path:
    """Write the application, its vocabulary and a bundle with random weights."""
    words = learn_subwords(TEXTS * 20, 320, min_characters=20)
    words.write(folder / "words.json")
    # As some other program may write it; a pack has all fields.
    fields = json.loads((folder / "words.json").read_text())
    del fields["special"]
    (folder / "words.json").write_text(json.dumps(fields))
    (folder / "app.py").write_text(SOURCE.replace("SIZE = 320", f"SIZE = {len(words)}"))
    found = find_application(str(folder / "app.py"))
    torch.manual_seed(0)
    examples = [{"tokens": np.array(words.encode(text)), "seed": np.array(seed)} for seed, text in enumerate(TEXTS)]
    return Bundle.write(found, found.model(), examples, to=folder / "bundle").folder


def shared_speaker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    """The pack, and its bundle; made once a run."""

    def make(folder: Path) -> None:
        export_pack(speaker_bundle(folder), folder / "pack")

    folder = made_once(tmp_path_factory, "speaker", make)
    return read_pack(folder / "pack"), folder / "bundle"
