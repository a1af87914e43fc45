"""A transformer with an encoder and a decoder, for sequences of tokens to sequences of tokens.

Vaswani et al. 2017, "Attention Is All You Need", with layer norms before each sublayer (Xiong et al. 2020, "On Layer
Normalization in the Transformer Architecture") and one embedding for source, target and output (Press and Wolf 2017).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError

# B batch, S source tokens, T target tokens, R room of the cache, D features, N heads, V vocabulary, L decoder layers


class Scored(NamedTuple):
    """Scores of given targets, `[B, T - 1]` each: of every token but the first.

    Args:
        log_probability: Of the token that is there.
        mean_log_probability: The mean over the vocabulary, for label smoothing.
        is_best: 1 where that token has the highest probability of all, else 0.
    """

    log_probability: Tensor
    mean_log_probability: Tensor
    is_best: Tensor


@final
class EncoderDecoder(nn.Module):
    """Encoder and autoregressive decoder over one vocabulary.

    `forward` scores given targets, for training. `begin` and `scores` go through an answer token by token: wrap the
    network into `penstock.nn.decoding.Greedy`, `Sampled` or `Beam`, which choose the tokens.

    Args:
        vocabulary: Number of tokens.
        width: Features of a token, D.
        heads: Attention heads.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder, L.
        hidden: Features inside the feed-forward layers.
        dropout: Probability of dropout.

    Raises:
        ApplicationError: The width is not a multiple of twice the heads.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 384,
        heads: int = 6,
        encoder_layers: int = 4,
        decoder_layers: int = 4,
        hidden: int = 1536,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ApplicationError(
                f"EncoderDecoder has width {width} for {heads} heads; give a multiple of {2 * heads}."
            )
        self.width = width
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(_EncoderLayer(width, heads, hidden, dropout) for _ in range(encoder_layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(_DecoderLayer(width, heads, hidden, dropout) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor, source_pair: Tensor, target_pair: Tensor) -> Scored:
        """Score given targets. A row may hold several pairs of a source and its target, one behind the other.

        Args:
            source: Tokens, `[B, S]`.
            target: Tokens, `[B, T]`; each target starts with a token that stands for its beginning.
            source_pair: Number of the pair that each source token belongs to, from 1, `[B, S]`; 0 for padding.
            target_pair: The same of the target tokens, `[B, T]`.
        """
        own_BT = target_pair[:, :-1]
        memory_BSD = self._encoded(source, _same(source_pair, source_pair), _places(source_pair))
        past_TT = torch.ones(own_BT.shape[1], own_BT.shape[1], dtype=torch.bool, device=own_BT.device).tril()
        sees, reads = _same(own_BT, own_BT) & past_TT, _same(own_BT, source_pair)
        hidden_BTD = self._embedded(target[:, :-1], _places(own_BT))
        for layer in self._decoder_layers():
            hidden_BTD = layer(hidden_BTD, memory_BSD, sees, reads)
        log_BTV = functional.log_softmax(self._logits(hidden_BTD), -1, dtype=torch.float32)
        next_BT1 = target[:, 1:, None]
        found_BT = log_BTV.gather(-1, next_BT1).squeeze(-1)
        return Scored(found_BT, log_BTV.mean(-1), (log_BTV.detach().amax(-1) == found_BT.detach()).float())

    def begin(self, tokens: Tensor, source: Tensor) -> dict[str, Tensor]:
        """Encode sources, and make the state before the first token of their targets.

        Args:
            tokens: Source tokens, `[B, S]`.
            source: Their number in each row, `[B]`.

        Returns:
            The state: `memory`, keys and values of the source `[B, S, 2 L D]`, and `cache`, those of the target so far
            `[B, R, 2 L D]`; their lengths `source` and `past`.
        """
        at_S = torch.arange(tokens.shape[1], device=tokens.device)
        valid_BS = at_S < source[:, None]
        memory_BSD = self._encoded(
            torch.where(valid_BS, tokens, 0), valid_BS[:, None, None], at_S.expand_as(tokens), valid_BS[..., None]
        )
        memory = torch.cat([part for layer in self._decoder_layers() for part in layer.keys_of(memory_BSD)], -1)
        return {
            "memory": memory,
            "source": source,
            "cache": memory.new_zeros(tokens.shape[0], 1, memory.shape[-1]),
            "past": torch.zeros_like(source),
        }

    def scores(self, state: Mapping[str, Tensor], token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one more token of each target.

        Args:
            state: Of `begin`, or of the call before. The cache has room for one more entry than the longest row has;
                what lies beyond `past` and beyond `source` is ignored.
            token: The newest token of each target, `[B]`.

        Returns:
            The scores of the next token, `[B, V]`, and the state with this one.
        """
        past_B1 = state["past"][:, None]
        old_BR = torch.arange(state["cache"].shape[1], device=token.device) < past_B1
        new_BR = torch.arange(state["cache"].shape[1], device=token.device) == past_B1
        valid_BS = torch.arange(state["memory"].shape[1], device=token.device) < state["source"][:, None]
        # Masked scores alone would not do: zero times NaN is NaN.
        memory = torch.where(valid_BS[..., None], state["memory"], 0).split(self.width, -1)
        cache = torch.where(old_BR[..., None], state["cache"], 0).split(self.width, -1)
        hidden_B1D = self._embedded(token[:, None], past_B1)
        written: list[Tensor] = []
        for place, layer in enumerate(self._decoder_layers()):
            pair = slice(2 * place, 2 * place + 2)
            hidden_B1D, own = layer.step(
                hidden_B1D, cache[pair], memory[pair], new_BR[..., None], (old_BR | new_BR)[:, None, None], valid_BS
            )
            written += own
        state = {**state, "cache": torch.cat(written, -1), "past": state["past"] + 1}
        return self._logits(hidden_B1D).squeeze(1), state

    def _encoded(self, tokens_BS: Tensor, sees: Tensor, places_BS: Tensor, valid: Tensor | None = None) -> Tensor:
        hidden_BSD = self._embedded(tokens_BS, places_BS)
        for layer in self.encoder:
            hidden_BSD = layer(hidden_BSD, sees)
        memory_BSD = self.encoder_norm(hidden_BSD)
        return memory_BSD if valid is None else torch.where(valid, memory_BSD, 0)

    def _embedded(self, tokens_BT: Tensor, places_BT: Tensor) -> Tensor:
        embedded_BTD = self.embed(tokens_BT) * math.sqrt(self.width)
        return self.dropout(embedded_BTD + sinusoids(places_BT, self.width).to(embedded_BTD.dtype))

    def _logits(self, hidden_BTD: Tensor) -> Tensor:
        return functional.linear(self.decoder_norm(hidden_BTD), self.embed.weight)

    def _decoder_layers(self) -> "list[_DecoderLayer]":
        return [layer for layer in self.decoder if isinstance(layer, _DecoderLayer)]


def sinusoids(places_BT: Tensor, width: int) -> Tensor:
    """Encode places as sines and cosines, `[B, T, width]`: Vaswani et al. 2017, section 3.5."""
    rates = torch.exp(torch.arange(0, width, 2, device=places_BT.device) * (-math.log(10_000.0) / width))
    angles = places_BT[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def _places(pairs_BT: Tensor) -> Tensor:
    """Return the place of each token in its own text, from the numbers of pairs along a row."""
    at_T = torch.arange(pairs_BT.shape[1], device=pairs_BT.device).expand_as(pairs_BT)
    begins_BT = functional.pad(pairs_BT[:, 1:] != pairs_BT[:, :-1], (1, 0), value=True)
    return at_T - torch.where(begins_BT, at_T, 0).cummax(1).values


def _same(pairs_BT: Tensor, others_BS: Tensor) -> Tensor:
    """Mask `[B, 1, T, S]`: tokens of one pair. Padding sees everything, so that no row of the mask is empty."""
    same_BTS = (pairs_BT[:, :, None] == others_BS[:, None]) | (pairs_BT == 0)[:, :, None]
    return same_BTS[:, None]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, query_BTD: Tensor, key_BSD: Tensor, value_BSD: Tensor, mask: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query_BTD, key_BSD, value_BSD)]
        dropout = self.dropout if self.training else 0.0
        attended_BNTD = functional.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout)
        return self.output(attended_BNTD.transpose(1, 2).flatten(2))


class _FeedForward(nn.Sequential):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width)
        )


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.feed_forward = _FeedForward(width, hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BSD: Tensor, sees: Tensor) -> Tensor:
        own, attention = self.norm(hidden_BSD), self.attention
        found = attention(attention.query(own), attention.key(own), attention.value(own), sees)
        hidden_BSD = hidden_BSD + self.dropout(found)
        return hidden_BSD + self.dropout(self.feed_forward(hidden_BSD))


class _DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.source_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.source_attention = (_Attention(width, heads, dropout) for _ in range(2))
        self.feed_forward = _FeedForward(width, hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTD: Tensor, memory_BSD: Tensor, sees: Tensor, reads: Tensor) -> Tensor:
        own, attention = self.norm(hidden_BTD), self.attention
        found = attention(attention.query(own), attention.key(own), attention.value(own), sees)
        return self._rest(hidden_BTD + self.dropout(found), self.keys_of(memory_BSD), reads)

    def keys_of(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source."""
        return self.source_attention.key(memory_BSD), self.source_attention.value(memory_BSD)

    def step(
        self,
        hidden_B1D: Tensor,
        cache: "tuple[Tensor, ...]",
        memory: "tuple[Tensor, ...]",
        new: Tensor,
        sees: Tensor,
        valid_BS: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """One token; returns the keys and values of all tokens so far too."""
        own, attention = self.norm(hidden_B1D), self.attention
        keys, values = (
            torch.where(new, project(own), old)
            for project, old in zip((attention.key, attention.value), cache, strict=True)
        )
        hidden_B1D = hidden_B1D + attention(attention.query(own), keys, values, sees)
        return self._rest(hidden_B1D, (memory[0], memory[1]), valid_BS[:, None, None]), [keys, values]

    def _rest(self, hidden_BTD: Tensor, memory: tuple[Tensor, Tensor], reads: Tensor) -> Tensor:
        query = self.source_attention.query(self.source_norm(hidden_BTD))
        hidden_BTD = hidden_BTD + self.dropout(self.source_attention(query, *memory, reads))
        return hidden_BTD + self.dropout(self.feed_forward(hidden_BTD))
