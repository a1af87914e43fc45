"""A small transformer that classifies texts by the bytes of their UTF-8."""

from typing import final

import torch
from torch import Tensor, nn

# B batch, T bytes, D features, P positions after a convolution, K classes

BYTES = 256
KERNEL = 5
STRIDE = 2


@final
class Shorten(nn.Module):
    """A convolution over every second position, which leaves out what lies beyond each length.

    Args:
        features: Features of a position, before and after.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(features, features, KERNEL, STRIDE, padding=KERNEL // 2)
        self.norm = nn.LayerNorm(features)

    def forward(self, hidden_BTD: Tensor, keep_BT: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, D]` and which positions are text, to `[B, P, D]` and the same, P = ceil(T / 2)."""
        # Zeros before the convolution, as beyond the ends of a text without padding.
        given_BDT = (hidden_BTD * keep_BT[..., None]).transpose(1, 2)
        made_BPD = self.convolution(given_BDT).transpose(1, 2)
        return self.norm(nn.functional.gelu(made_BPD)), keep_BT[:, ::STRIDE]


@final
class TextClassifier(nn.Module):
    """Texts to scores of classes: two convolutions shorten a text by four, then attention, then the mean.

    Clark et al. 2022, "CANINE", shortens characters by a strided convolution before a deep transformer too. Attention
    gets no positions: the convolutions see the order, and no text is longer than a table of positions.

    Args:
        classes: Number of classes.
        width: Features of a position.
        layers: Transformer layers.
        heads: Attention heads.
        dropout: Dropout probability of the transformer layers.
    """

    def __init__(self, classes: int, *, width: int = 96, layers: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.shorten = nn.ModuleList(Shorten(width) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, nn.functional.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, text: Tensor, bytes: Tensor) -> Tensor:
        """Bytes `[B, T]` and their numbers `[B]` to logits `[B, K]`."""
        keep_BP = torch.arange(text.shape[1], device=text.device)[None] < bytes[:, None]
        hidden_BPD = self.embed(text.long())
        for shorten in self.shorten:
            hidden_BPD, keep_BP = shorten(hidden_BPD, keep_BP)
        for layer in self.layers:
            hidden_BPD = layer(hidden_BPD, src_key_padding_mask=~keep_BP)
        kept_BPD = self.norm(hidden_BPD) * keep_BP[..., None]
        return self.head(kept_BPD.sum(1) / keep_BP.sum(1, keepdim=True))

    def predict(self, text: Tensor, bytes: Tensor) -> Tensor:
        """The probabilities of the classes, `[B, K]`."""
        return self(text, bytes).softmax(1)
