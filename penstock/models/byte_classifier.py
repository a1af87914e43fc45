"""A small transformer that classifies texts by the bytes of their UTF-8."""

from typing import cast, final

import torch
from torch import Tensor, nn

# B batch, T bytes, D features, P positions after a convolution, K classes

BYTES = 256
KERNEL = 5
STRIDE = 2
# Of the hash of n-grams; products stay below 2 ** 62.
FACTOR, MASK, SHIFT = 0x5BD1E995, (1 << 31) - 1, 15


@final
class NGrams(nn.Module):
    """Embeddings of the byte n-grams that end at each position, found by a hash.

    Pagnoni et al. 2024, "Byte Latent Transformer: Patches Scale Better Than Tokens", section 3.2.1.

    Args:
        features: Features of a position.
        sizes: Numbers of bytes, from 2.
        buckets: Rows of the table of each size; n-grams of one hash share a row.
    """

    def __init__(self, features: int, sizes: tuple[int, ...], buckets: int) -> None:
        super().__init__()
        self.sizes, self.buckets = sizes, buckets
        self.tables = nn.ModuleDict({str(size): nn.Embedding(buckets, features) for size in sizes})
        for table in self.tables.values():
            nn.init.normal_(cast(nn.Embedding, table).weight, std=0.1)

    def forward(self, text_BT: Tensor) -> Tensor:
        """Bytes `[B, T]` to the sum of the embeddings, `[B, T, D]`."""
        # Zero is the place before the beginning of a text.
        codes_BT = text_BT.long() + 1
        hash_BT = codes_BT
        found_BTD = torch.zeros((), device=text_BT.device)
        for size in range(2, max(self.sizes) + 1):
            before_BT = nn.functional.pad(codes_BT, (size - 1, 0))[:, : codes_BT.shape[1]]
            hash_BT = (hash_BT * FACTOR + before_BT) & MASK
            if size in self.sizes:
                found_BTD = found_BTD + self.tables[str(size)]((hash_BT ^ (hash_BT >> SHIFT)) % self.buckets)
        return found_BTD


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
    """Texts to scores of classes, the sum of two: of n-grams, and of a small transformer.

    The mean of n-gram embeddings is a linear classifier of n-grams (Joulin et al. 2017, "Bag of Tricks for Efficient
    Text Classification"). Two convolutions shorten a text by four before the transformer, as Clark et al. 2022,
    "CANINE", do. Attention gets no positions: n-grams and convolutions see the order, and no text is longer than a
    table of positions.

    Args:
        classes: Number of classes.
        width: Features of a position.
        layers: Transformer layers.
        heads: Attention heads.
        dropout: Dropout probability of the transformer layers.
        sizes: Numbers of bytes of the n-grams, from 2.
        buckets: Embeddings of the n-grams of each size.
        ngram_dropout: Dropout probability of their embeddings.
    """

    def __init__(
        self,
        classes: int,
        *,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        sizes: tuple[int, ...] = (2, 3, 4, 5),
        buckets: int = 8192,
        ngram_dropout: float = 0.3,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.ngrams = NGrams(width, sizes, buckets)
        self.ngram_dropout = nn.Dropout(ngram_dropout)
        self.ngram_norm = nn.LayerNorm(width)
        self.ngram_head = nn.Linear(width, classes)
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
        ngrams_BPD = self.ngram_dropout(self.ngrams(text))
        of_ngrams_BK = self.ngram_head(self.ngram_norm(_mean(ngrams_BPD, keep_BP)))
        hidden_BPD = self.embed(text.long()) + ngrams_BPD
        for shorten in self.shorten:
            hidden_BPD, keep_BP = shorten(hidden_BPD, keep_BP)
        for layer in self.layers:
            hidden_BPD = layer(hidden_BPD, src_key_padding_mask=~keep_BP)
        return of_ngrams_BK + self.head(_mean(self.norm(hidden_BPD), keep_BP))

    def predict(self, text: Tensor, bytes: Tensor) -> Tensor:
        """The probabilities of the classes, `[B, K]`."""
        return self(text, bytes).softmax(1)


def _mean(hidden_BPD: Tensor, keep_BP: Tensor) -> Tensor:
    return (hidden_BPD * keep_BP[..., None]).sum(1) / keep_BP.sum(1, keepdim=True)
