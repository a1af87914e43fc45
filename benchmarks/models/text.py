"""A transformer encoder over tokens with random weights: 6 layers of width 384, texts of 16 to 512 tokens.

The application `padded` is the same network behind inputs of 512 tokens, for a server without varying lengths.
`base` and `base_padded` are of the size of BERT-base: 12 layers of width 768.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from penstock import Application, Dim, TensorSpec
from penstock.core.spec import Array

SHORTEST, LONGEST, MEDIAN = 16, 512, 60
# Of the natural logarithm of a text's length: 1 in 200 texts has 512 tokens or more.
SPREAD = 0.83
WIDTH, LAYERS, HEADS, VOCABULARY, CLASSES = 384, 6, 6, 8192, 10
TOKENS = Dim("tokens", max=LONGEST, min=SHORTEST)


class TextEncoder(nn.Module):
    """Scores of a text: the mean of what the encoder makes of its tokens, and a linear layer.

    Args:
        width: Numbers of a token.
        layers: Layers.
        heads: Heads of the attention.
    """

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return scores `[B, 10]` of texts `[B, T]`."""
        keep = attention_mask != 0
        hidden = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = self.layers(hidden, src_key_padding_mask=~keep) * keep[..., None]
        return self.classify(hidden.sum(1) / keep.sum(1, keepdim=True).clamp(min=1))


def texts(count: int, seed: int = 0) -> list[dict[str, Array]]:
    """Random texts of log-normal length."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), SPREAD, count).round(), SHORTEST, LONGEST).astype(int)
    return [
        {"input_ids": rng.integers(0, VOCABULARY, length), "attention_mask": np.ones(length, np.int64)}
        for length in lengths
    ]


def padded_texts(count: int, seed: int = 0) -> list[dict[str, Array]]:
    """The same texts, each padded to 512 tokens."""
    return [
        {name: np.pad(array, (0, LONGEST - len(array))) for name, array in text.items()} for text in texts(count, seed)
    ]


app = Application(
    name="text",
    description="A transformer encoder over tokens with random weights.",
    inputs={
        "input_ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, VOCABULARY - 1)),
        "attention_mask": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="1 where there is a token", limits=(0, 1)),
    },
    outputs={"scores": TensorSpec(dtype="float32", shape=(CLASSES,), meaning="score of each class")},
    model=TextEncoder,
)
padded = Application(
    name="padded",
    description="The same network, its inputs padded to 512 tokens by the client.",
    inputs={name: replace(spec, shape=(LONGEST,)) for name, spec in app.inputs.items()},
    outputs=app.outputs,
    model=TextEncoder,
)
base = replace(app, name="base", model=partial(TextEncoder, 768, 12, 12))
base_padded = replace(padded, name="base_padded", model=base.model)
