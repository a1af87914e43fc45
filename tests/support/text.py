"""A small text network with two inputs and three outputs of varying lengths, and its bundle."""

from pathlib import Path

import numpy as np

from penstock.core.spec import Array

MAX_TOKENS = 12

# Sums of the embeddings of tokens; `found` has those that are multiples of three, as many as there are.
TEXT = """
from penstock import Application, Dim, TensorSpec

TOKENS = Dim("tokens", max=12)
FOUND = Dim("found", max=12, min=0)


def network():
    # Here and not above, so that front-ends, which need no network, do not load torch.
    import torch
    from torch import nn

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 3)
            self.tag = nn.Linear(3, 2)

        def forward(self, input_ids, attention_mask):
            keep = (attention_mask != 0)[..., None]
            hidden = self.embed(input_ids) * keep
            special = keep[..., 0] & (input_ids % 3 == 0)
            order = torch.argsort(~special, dim=1, stable=True)
            return {
                "logits": hidden.sum(1) / keep.sum(1).clamp(min=1),
                "tags": self.tag(hidden).softmax(-1),
                "multiples": torch.gather(input_ids, 1, order),
                "found": special.sum(1),
            }

    torch.manual_seed(0)
    return Text()


app = Application(
    name="text",
    description="Classifies a text, and tags its words.",
    inputs={
        "input_ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, 99)),
        "attention_mask": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="1 for a token", limits=(0, 1)),
    },
    outputs={
        "logits": TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("bad", "so so", "good")),
        "tags": TensorSpec(dtype="float32", shape=(TOKENS, 2), meaning="kind of each word", labels=("verb", "noun")),
        "multiples": TensorSpec(dtype="int64", shape=(FOUND,), meaning="ids that are multiples of three"),
    },
    model=":network",
)
"""


def texts(*lengths: int) -> list[dict[str, Array]]:
    """Inputs of these lengths, all different."""
    return [{"input_ids": (np.arange(n) * 7 + n) % 100, "attention_mask": np.ones(n, np.int64)} for n in lengths]


def write_text(folder: Path) -> Path:
    """Write the application and its bundle into a folder."""
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    (folder / "app.py").write_text(TEXT)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), texts(1, 2, 5, 12), to=folder / "bundle")
    return folder / "bundle"
