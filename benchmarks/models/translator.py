"""An encoder and an attention decoder of a translator's size with random weights; each request says where it ends."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from penstock import Application, Dim, Generate, TensorSpec
from penstock.core.spec import Array

# B rows, S source tokens, P past tokens, H heads, D width of a head, W width

WORDS, WIDTH, LAYERS, HEADS = 8000, 256, 4, 4
MOST_STEPS, MEAN_STEPS = 256, 30
MOST_SOURCE = 64

source, past = Dim("source", max=MOST_SOURCE), Dim("past", max=MOST_STEPS)


class Decoder(nn.Module):
    """One layer: attention over its own past, attention over the source, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.own_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.source_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm_own, self.norm_source, self.norm_mlp = (nn.LayerNorm(WIDTH) for _ in range(3))


class Translator(nn.Module):
    """Greedy decoding with caches of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(MOST_STEPS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(Decoder() for _ in range(LAYERS))
        self.memory = nn.Linear(WIDTH, LAYERS * 2 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(source_ids)))

    def begin(self, source_ids: Tensor, end: Tensor, source: Tensor) -> dict[str, Tensor]:
        rows, length = source_ids.shape
        at = torch.arange(length, device=source_ids.device)
        hidden_BSW = self.embed(source_ids) + self.place(at)
        hidden_BSW = self.encoder(hidden_BSW, src_key_padding_mask=at >= source[:, None])
        # [B, layers and kinds, H, S, D]
        memory = self.memory(hidden_BSW).reshape(rows, length, 2 * LAYERS, HEADS, -1).permute(0, 2, 3, 1, 4)
        return {
            "memory": memory,
            "cache": hidden_BSW.new_zeros(rows, 2 * LAYERS, HEADS, 0, WIDTH // HEADS),
            "past": torch.zeros_like(end),
            "last": torch.ones_like(end),
            "end": end,
        }

    def step(self, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        memory, cache, past_B = state["memory"], state["cache"], state["past"]
        rows, each = torch.arange(len(past_B), device=past_B.device), WIDTH // HEADS
        own_mask = (torch.arange(cache.shape[3], device=past_B.device) <= past_B[:, None])[:, None, None]
        source_mask = (torch.arange(memory.shape[3], device=past_B.device) < state["source"][:, None])[:, None, None]
        x_BW = self.embed(state["last"]) + self.place(past_B)
        for index, module in enumerate(self.decoder):
            layer = cast(Decoder, module)
            q_BW, k_BW, v_BW = layer.own(layer.norm_own(x_BW)).split(WIDTH, -1)
            cache[rows, 2 * index, :, past_B] = k_BW.reshape(-1, HEADS, each)
            cache[rows, 2 * index + 1, :, past_B] = v_BW.reshape(-1, HEADS, each)
            keys, values = cache[:, 2 * index], cache[:, 2 * index + 1]
            x_BW = x_BW + layer.own_out(_attend(q_BW, keys, values, own_mask))
            keys, values = memory[:, 2 * index], memory[:, 2 * index + 1]
            x_BW = x_BW + layer.source_out(_attend(layer.query(layer.norm_source(x_BW)), keys, values, source_mask))
            x_BW = x_BW + layer.mlp(layer.norm_mlp(x_BW))
        token_B = self.head(x_BW).argmax(-1)
        after = {**state, "past": past_B + 1, "last": token_B}
        return token_B, after, past_B + 1 >= state["end"]


def _attend(query_BW: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    query = query_BW.reshape(len(query_BW), HEADS, 1, -1)
    return scaled_dot_product_attention(query, keys, values, mask).reshape(query_BW.shape)


def _spec(dtype: str, *shape: int, **more: float) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="of a translator", **more)  # pyright: ignore[reportArgumentType]


app = Application(
    name="translator",
    inputs={"source_ids": _spec("int64", source), "end": _spec("int64")},
    output=_spec("int64"),
    model=Translator,
    generate=Generate(
        state={
            "memory": _spec("float32", 2 * LAYERS, HEADS, source, WIDTH // HEADS),
            "cache": _spec("float32", 2 * LAYERS, HEADS, past, WIDTH // HEADS),
            "last": _spec("int64"),
            "end": _spec("int64"),
        },
        max_steps=MOST_STEPS,
    ),
)


@dataclass(frozen=True)
class Requests:
    """Requests with sources of 4 to 64 tokens and answers of geometric lengths.

    Args:
        seed: Seed of the generator.
    """

    seed: int

    def __call__(self, count: int) -> list[dict[str, Array]]:
        """Draw requests."""
        rng = np.random.default_rng(self.seed)
        ends = np.minimum(rng.geometric(1 / MEAN_STEPS, count), MOST_STEPS)
        lengths = rng.integers(4, MOST_SOURCE, count, endpoint=True)
        return [
            {"source_ids": rng.integers(2, WORDS, length), "end": np.array(end)}
            for length, end in zip(lengths, ends, strict=True)
        ]
