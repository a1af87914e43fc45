"""Applications of several named tensors, and the pack of one of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Bundle
from penstock.core.packs.pack import Pack, read_pack
from penstock.core.source_files.find_application import find_application
from penstock.export.pack_writer import export_pack
from tests.support.shared import made_once

LONGEST = 24
LENGTHS = (1, 2, 7, LONGEST)

TEXT = """
import torch
from torch import nn
from penstock import Application, Dim, TensorSpec

tokens = Dim("tokens", max=24)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classify = nn.Linear(16, 3)
        self.tag = nn.Linear(16, 4)

    def forward(self, input_ids, attention_mask):
        keep = attention_mask != 0
        hidden = self.layers(self.embed(input_ids), src_key_padding_mask=~keep)
        pooled = (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return {"mood": self.classify(pooled).softmax(-1), "tags": self.tag(hidden)}

ids = TensorSpec(dtype="int64", shape=(tokens,), meaning="token ids", limits=(0, 49))
mask = TensorSpec(dtype="int64", shape=(tokens,), meaning="1 where there is a token", limits=(0, 1))
app = Application(
    name="mood",
    inputs={"input_ids": ids, "attention_mask": mask},
    outputs={
        "mood": TensorSpec(
            dtype="float32", shape=(3,), meaning="mood", units="probability", labels=("sad", "calm", "glad")
        ),
        "tags": TensorSpec(dtype="float32", shape=(tokens, 4), meaning="score of each tag", labels=tuple("NVAX")),
    },
    model=Net,
)
"""

BOXES = """
import torch
from torch import nn
from penstock import Application, Dim, TensorSpec

boxes = Dim("boxes", max=6, min=0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 6 * 5)

    def forward(self, grey):
        found = self.head(grey.flatten(1).float() / 255).reshape(-1, 6, 5)
        number = grey[:, 0, 0].long() % 7
        keep = torch.arange(6) < number[:, None]
        return {"corners": found[..., :4] * keep[..., None], "scores": found[..., 4] * keep, "boxes": number}

app = Application(
    name="boxes",
    inputs={"grey": TensorSpec(dtype="uint8", shape=(4, 4), meaning="grey picture")},
    outputs={
        "corners": TensorSpec(dtype="float32", shape=(boxes, 4), meaning="corners"),
        "scores": TensorSpec(dtype="float32", shape=(boxes,), meaning="scores"),
    },
    model=Net,
)
"""


# A recurrent layer, and attention with learned distances as that of a T5, over a length that varies.
SIGNAL = """
import torch
from torch import nn
from penstock import Application, Dim, TensorSpec

hours = Dim("hours", max=40, min=2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(3, 16, batch_first=True)
        self.query = nn.Linear(3, 16)
        self.level = nn.Linear(16, 1)
        self.look = nn.Linear(16, 4)
        self.distance = nn.Embedding(8, 2)

    def forward(self, sensors, hours):
        found, _ = self.recurrent(sensors)
        heads = self.query(sensors).unflatten(-1, (2, 8)).transpose(1, 2)
        at = torch.arange(sensors.shape[1])
        near = self.distance((at - at[:, None]).clamp(0, 7)).permute(2, 0, 1)
        mask = near + torch.where(at < hours[:, None], 0.0, -1e9)[:, None, None]
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        seen = seen.transpose(1, 2).reshape(*sensors.shape[:2], -1)
        return {"level": self.level(found).squeeze(-1), "look": self.look(seen + found)}

app = Application(
    name="tank",
    input=TensorSpec(dtype="float32", shape=(hours, 3), meaning="sensors", name="sensors"),
    outputs={
        "level": TensorSpec(dtype="float32", shape=(hours,), meaning="level"),
        "look": TensorSpec(dtype="float32", shape=(hours, 4), meaning="look"),
    },
    model=Net,
)
"""


PREPARED = """
import numpy as np
import torch
from torch import nn
from penstock import Application, Prepare, RawSpec, TensorSpec

class Small(nn.Module):
    def forward(self, rgba):
        chw = rgba[..., :3].permute(2, 0, 1)[None].float()
        return nn.functional.interpolate(chw, size=(4, 4), mode="bilinear", antialias=False)[0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Linear(48, 2)
        self.place = nn.Linear(48, 4)

    def forward(self, picture):
        flat = picture.flatten(1) / 255
        return {"kind": self.kind(flat).softmax(-1), "place": self.place(flat)}

app = Application(
    name="places",
    input=TensorSpec(dtype="float32", shape=(3, 4, 4), meaning="a small picture"),
    outputs={
        "kind": TensorSpec(dtype="float32", shape=(2,), meaning="kind", units="probability", labels=("cat", "dog")),
        "place": TensorSpec(dtype="float32", shape=(4,), meaning="where it is"),
    },
    decode=lambda body, kind: np.frombuffer(body, np.uint8).reshape(-1, 1, 4),
    accepts=("application/x-pixels",),
    prepare=Prepare(
        module=Small, raw=RawSpec(dtype="uint8", shape=(None, None, 4), max_shape=(64, 64, 4), meaning="RGBA")
    ),
    model=Net,
)
"""


TABLE = """
import torch
from torch import nn
from penstock import Application, Dim, TensorSpec

rows, cols = Dim("rows", max=3, min=0), Dim("cols", max=3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, counts, places, scale, rows):
        outer = counts[:, :, None] * places[:, None, :, 0] * self.weight[0] * scale[:, None, None]
        return {"outer": outer, "number": rows.float() * self.weight[1], "sums": torch.cumsum(counts.long(), 1)}

app = Application(
    name="table",
    inputs={
        "counts": TensorSpec(dtype="int32", shape=(rows,), meaning="counts"),
        "places": TensorSpec(dtype="float32", shape=(cols, 2), meaning="places"),
        "scale": TensorSpec(dtype="float32", shape=(), meaning="scale"),
    },
    outputs={
        "outer": TensorSpec(dtype="float32", shape=(rows, cols), meaning="products"),
        "number": TensorSpec(dtype="float32", shape=(), meaning="rows"),
        "sums": TensorSpec(dtype="int64", shape=(rows,), meaning="sums"),
    },
    model=Net,
)
"""


def bundle_of(source: str, folder: Path, examples: Any) -> Path:
    """Write the bundle of an application with untrained weights."""
    (folder / "app.py").write_text(source)
    found = find_application(str(folder / "app.py"))
    torch.manual_seed(0)
    return Bundle.write(found, found.model(), examples, to=folder / "bundle").folder


def text(tokens: int, seed: int = 0) -> dict[str, Any]:
    """The inputs of a text of random tokens."""
    ids = np.random.default_rng(seed + tokens).integers(0, 50, tokens)
    return {"input_ids": ids, "attention_mask": np.ones(tokens, np.int64)}


def shared_mood(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    """The pack of the application in `TEXT`, and its bundle; made once a run."""

    def make(folder: Path) -> None:
        bundle = bundle_of(TEXT, folder, [text(tokens) for tokens in LENGTHS])
        export_pack(bundle, folder / "pack")

    folder = made_once(tmp_path_factory, "mood", make)
    return read_pack(folder / "pack"), folder / "bundle"
