"""Small applications of several kinds for tests of the server's page and of the offline app, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle

# A label that would be an element if it were not escaped.
EVIL = "<img src=x onerror=window.evil=1>"
HEAD = """
import numpy as np
import torch

from penstock import Application, ByteText, Dim, Live, TensorSpec
from penstock.nn import CausalConv1d, Sequential
"""
FLOWERS = """
app = Application(
    name="flowers",
    description="Tells three kinds of iris apart.",
    input=TensorSpec(
        dtype="float32",
        shape=(4,),
        meaning="sizes of a flower",
        units="cm",
        labels=("sepal length", "sepal width", "petal length", "petal width"),
        name="sizes",
    ),
    output=TensorSpec(
        dtype="float32", shape=(3,), meaning="score of each kind", units="logit", labels=KINDS, name="kinds"
    ),
    model=lambda: torch.nn.Linear(4, 3),
)
"""
HOUSES = """
app = Application(
    name="houses",
    description="Estimates the size of a house.",
    input=TensorSpec(dtype="float32", shape=(3,), meaning="rooms, floors and age", name="house"),
    output=TensorSpec(
        dtype="float32", shape=(2,), meaning="sizes of the house", units="m", labels=("width", "depth"), name="extents"
    ),
    model=lambda: torch.nn.Linear(3, 2),
)
"""
WAVES = """
class Smooth(torch.nn.Module):
    def forward(self, wave_BT):
        return torch.nn.functional.avg_pool1d(wave_BT[:, None], 9, 1, 4)[:, 0], wave_BT.amax(1)


app = Application(
    name="waves",
    description="Smooths a signal.",
    inputs={"wave": TensorSpec(dtype="float32", shape=(400,), meaning="a signal", units="mV")},
    outputs={
        "smooth": TensorSpec(dtype="float32", shape=(400,), meaning="the signal without noise", units="mV"),
        "peak": TensorSpec(dtype="float32", shape=(), meaning="its largest number", units="mV"),
    },
    model=Smooth,
)
"""
SHAKE = """
def net():
    return Sequential(CausalConv1d(3, 8, 5), torch.nn.ReLU(), torch.nn.Linear(8, 3), torch.nn.LogSoftmax(-1))


app = Application(
    name="shake",
    description="Tells what a hand does with a sensor.",
    input=TensorSpec(dtype="float32", shape=(10, 3), meaning="acceleration along x, y and z", units="g", name="motion"),
    output=TensorSpec(
        dtype="float32",
        shape=(10, 3),
        meaning="what the hand does",
        units="log-probability",
        labels=("still", "shake", "turn"),
        name="moves",
    ),
    live=Live(rate_hz=50),
    chunks=8,
    model=net,
)
"""
MOODS = """
class Moods(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, text_BL):
        known_BL = (text_BL > 0).float()
        mean_BD = (self.embed(text_BL.long()) * known_BL[..., None]).sum(1) / known_BL.sum(1, keepdim=True).clamp(min=1)
        return self.head(mean_BD).softmax(-1)


app = Application(
    name="moods",
    description="Tells the mood of a text.",
    input=TensorSpec(dtype="uint8", shape=(Dim("bytes", max=400),), meaning="a text in UTF-8", name="text"),
    output=TensorSpec(
        dtype="float32", shape=(3,), meaning="moods", units="probability", labels=("sad", "calm", "glad"), name="moods"
    ),
    decode=ByteText(tensor="text", max_bytes=400),
    accepts=("text/plain",),
    model=Moods,
)
"""
# The examples of a decode of one's own are token ids, which no page can turn into texts.
WORDS = """
KNOWN = {word: number for number, word in enumerate("the film was good bad".split(), 1)}
tokens = Dim("tokens", max=12)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 2)

    def forward(self, ids, mask):
        return (self.embed(ids) * mask[..., None]).sum(1)


def decode(body, content_type):
    ids = np.array([KNOWN.get(word, 0) for word in body.decode().split()][:12] or [0], np.int64)
    return {"ids": ids, "mask": np.ones(len(ids), np.int64)}


app = Application(
    name="words",
    inputs={
        "ids": TensorSpec(dtype="int64", shape=(tokens,), meaning="numbers of words", limits=(0, 7)),
        "mask": TensorSpec(dtype="int64", shape=(tokens,), meaning="1 for a word", limits=(0, 1)),
    },
    output=TensorSpec(dtype="float32", shape=(2,), meaning="moods", labels=("sad", "glad"), name="moods"),
    decode=decode,
    accepts=("text/plain",),
    model=Words,
)
"""
TEXTS = (
    "What a wonderful morning!",
    "It rained all day and nobody came.",
    "The train leaves at nine.",
    "Grüße aus Köln",
)


def page_bundles(folder: Path, *, evil: bool = False) -> list[Path]:
    """Write a bundle of each application."""
    rng, times = np.random.default_rng(0), np.arange(400)
    kinds = ("setosa", "versicolor", EVIL if evil else "virginica")
    waves = [np.sin(times / period) + rng.normal(0, 0.3, 400) for period in (9, 25, 50)]
    motion = [np.cumsum(rng.normal(0, 0.2, (120, 3)), 0) for _ in range(3)]
    examples: dict[str, Any] = {
        f"KINDS = {kinds!r}{FLOWERS}": rng.uniform(1, 7, (8, 4)).astype(np.float32).round(1),
        HOUSES: rng.uniform(1, 9, (3, 3)).astype(np.float32).round(),
        WAVES: np.array(waves, np.float32),
        SHAKE: np.array(motion, np.float32),
        MOODS: [{"text": np.frombuffer(text.encode(), np.uint8)} for text in TEXTS],
        WORDS: [{"ids": np.arange(1, count), "mask": np.ones(count - 1, np.int64)} for count in (3, 5)],
    }
    return [_bundle(folder / str(number), *each) for number, each in enumerate(examples.items())]


def _bundle(folder: Path, source: str, examples: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(HEAD + source)
    found = find_application(str(folder / "app.py"))
    torch.manual_seed(0)
    return Bundle.write(found, found.model(), examples, to=folder / "bundle").folder
