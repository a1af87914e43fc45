"""Self-attention over a bounded number of past frames, so that a stream's cache has a fixed size."""

from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.nn.streaming import State, Step, Streaming, valid_alone

# B batch, T frames of a chunk, L frames of the past, K = L + T keys, N heads, D features of a head,
# P places of a tile, F = T P


@final
class StreamingAttention(Streaming):
    """Multi-head self-attention in which a frame attends to itself and the `left` frames before it.

    Positions are relative: a learned bias for each distance and head is added to the scores. Vaswani et al. 2017,
    "Attention Is All You Need", section 3.2; the bias is that of Raffel et al. 2020, "Exploring the Limits of Transfer
    Learning", section 2.1, with a bucket for each distance.

    Args:
        features: Features of a frame.
        heads: Attention heads.
        left: Past frames that each frame attends to.

    Raises:
        ApplicationError: The features are not a multiple of the heads, or `left` is negative.
    """

    def __init__(self, features: int, heads: int, left: int) -> None:
        super().__init__()
        if features % heads:
            raise ApplicationError(f"StreamingAttention has {features} features for {heads} heads; they must divide.")
        if left < 0:
            raise ApplicationError(f"StreamingAttention looks {left} frames back; it must be 0 or more.")
        self.heads = heads
        self.left = left
        self.project = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.distance_bias = nn.Parameter(torch.zeros(heads, left + 1))

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to the same shape."""
        if not whole_BT.shape[1]:
            return whole_BT
        # Padding is masked, but NaN in it would still spread: set it to zero.
        query, key, value = self.project(valid_alone(whole_BT, length_B)).chunk(3, -1)
        return self._attended(query, key, value, None)

    def initial_state(self, batch: int) -> State:
        """Empty cache: keys and values, the newest last, and their number."""
        weight = self.output.weight
        cache_BL = weight.new_zeros(batch, self.left, weight.shape[0])
        return cache_BL, cache_BL.clone(), torch.zeros(batch, dtype=torch.int64, device=weight.device)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        keys_BL, values_BL, held_B = cast(tuple[Tensor, Tensor, Tensor | int], state)
        if isinstance(held_B, int):
            # A constant in the exported graph of steady batches: see `penstock.runtime.onnx.onnx_export`.
            held_B = torch.full_like(length_B, held_B)
        query, key, value = self.project(valid_alone(chunk_BT, length_B)).chunk(3, -1)
        key, value = torch.cat([keys_BL, key], 1), torch.cat([values_BL, value], 1)
        at_K = torch.arange(key.shape[1], device=key.device)
        # The cache is filled from its end; its empty entries are masked.
        seen_BK = at_K >= self.left - held_B[:, None]
        output_BT = self._attended(query, key, value, seen_BK)
        row_B1 = torch.arange(chunk_BT.shape[0], device=key.device)[:, None]
        newest_BL = length_B[:, None] + at_K[: self.left]
        held_B = (held_B + length_B).clamp(max=self.left)
        return Step(output_BT, length_B, (key[row_B1, newest_BL], value[row_B1, newest_BL], held_B))

    def _attended(self, query_BT: Tensor, key_BK: Tensor, value_BK: Tensor, seen_BK: Tensor | None) -> Tensor:
        bias_NTK = self._bias(query_BT.shape[1], key_BK.shape[1])
        mask = bias_NTK if seen_BK is None else torch.where(seen_BK[:, None, None], bias_NTK, -torch.inf)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query_BT, key_BK, value_BK)]
        attended_BTND = functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
        if torch.compiler.is_exporting():
            # The exported form of attention has another memory layout.
            attended_BTND = attended_BTND.clone(memory_format=torch.contiguous_format)
        return self.output(attended_BTND.flatten(2))

    def _bias(self, frames: int, keys: int) -> Tensor:
        """Bias of each key for the last frames, `[N, T, K]`, minus infinity where a frame does not attend."""
        # By distance, the farthest first. A tile is one entry longer than a row of the result, so that each frame reads
        # it one entry earlier. The gradient of an index for each place took a millisecond a layer on an H200, and
        # `unfold` makes the size of an exported or compiled network fixed.
        tile_NP = functional.pad(self.distance_bias.flip(-1), (keys - 1 - self.left, frames), value=-torch.inf)
        tiles_NF = tile_NP[:, None].expand(-1, frames, -1).flatten(1)
        rows_NTP = tiles_NF[:, frames - 1 : -1].unflatten(-1, (frames, keys + frames - 1))
        # Attention on a GPU takes only aligned rows.
        return rows_NTP[..., :keys].contiguous()
