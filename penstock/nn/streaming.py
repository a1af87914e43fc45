"""Streaming layers: trained on whole sequences and served a chunk at a time, with the same outputs.

State between chunks is a value that `step` takes and returns, never an attribute. A stream's state can therefore be
batched with others, split off again, saved, and continued elsewhere.

For every layer, the concatenated outputs of the steps equal `forward` of the whole sequence, for any division into
chunks. A row's outputs depend only on its own chunks: not on other rows, on padding after the row's length, or on the
chunk length of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

# B batch, T frames of a chunk, U output frames

# A tensor with the batch first, or a tuple of such trees. A layer without memory has ().
State: TypeAlias = "Tensor | tuple[State, ...]"


class Step(NamedTuple):
    """The result of one chunk.

    Args:
        output_BU: `[B, U, ...]`, the output frames of each row, then padding.
        length_B: Number of output frames of each row, int64.
        state: State for the next step.
    """

    output_BU: Tensor
    length_B: Tensor
    state: State


class Streaming(nn.Module, ABC):
    """A layer that can be run over whole sequences or over chunks."""

    @abstractmethod
    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """Run over whole sequences.

        Args:
            whole_BT: `[B, T, ...]`.
            length_B: Number of valid frames of each row, int64; all by default. Frames after them affect no valid
                output.

        Returns:
            `[B, U, ...]`; each row has `output_lengths(length_B)` valid frames.
        """

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """Compute the output lengths of whole sequences; by default the input lengths."""
        return length_B

    def initial_state(self, batch: int) -> State:
        """Return the state of new streams, with the parameters' device and dtype; by default the empty state."""
        return ()

    @abstractmethod
    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """Run over the next chunk of each row.

        Args:
            chunk_BT: `[B, T, ...]`, T at least 1.
            length_B: Number of valid frames of each row, int64, 0 to T. A row of length 0 whose stream does not end has
                no output, and its state is unchanged, bit for bit.
            state: State that the previous step returned.
            last_B: Bool; True if a stream ends with this chunk, which also returns its delayed outputs. None if no
                stream ends.
        """


class Sequential(Streaming):
    """Layers in sequence; the state is the tuple of their states.

    Args:
        layers: The layers, in order. A plain module must treat each frame independently.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer if isinstance(layer, Streaming) else FrameWise(layer) for layer in layers)

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, ...]` to `[B, U, ...]`, see `Streaming`."""
        for layer in self._streaming():
            whole_BT = layer(whole_BT, length_B)
            length_B = None if length_B is None else layer.output_lengths(length_B)
        return whole_BT

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """Output lengths after all layers."""
        for layer in self._streaming():
            length_B = layer.output_lengths(length_B)
        return length_B

    def initial_state(self, batch: int) -> State:
        """Tuple of the layers' states."""
        return tuple(layer.initial_state(batch) for layer in self._streaming())

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        after: list[State] = []
        for layer, before in zip(self._streaming(), state, strict=True):
            chunk_BT, length_B, own = layer.step(chunk_BT, length_B, before, last_B)
            after.append(own)
        return Step(chunk_BT, length_B, tuple(after))

    def _streaming(self) -> list[Streaming]:
        return [cast(Streaming, layer) for layer in self.layers]


class FrameWise(Streaming):
    """A layer that treats each frame independently, such as a linear layer, layer norm or an activation; stateless.

    Args:
        module: Takes `[B, T, ...]` and treats each frame independently.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, ...]` to `[B, T, ...]`."""
        return self.module(whole_BT)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        return Step(self.module(chunk_BT), length_B, state)


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply a function to every leaf of a state: to move it, select rows, or change precision."""
    if isinstance(state, Tensor):
        return function(state)
    return tuple(map_state(function, part) for part in state)


def leaves(state: State) -> list[Tensor]:
    """Return all tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


def mask_of(length_B: Tensor, frames: int) -> Tensor:
    """Mask of valid frames, bool `[B, T]`."""
    return torch.arange(frames, device=length_B.device) < length_B[:, None]


def valid_alone(frames_BT: Tensor, length_B: Tensor | None) -> Tensor:
    """Set invalid frames to zero."""
    if length_B is None:
        return frames_BT
    return torch.where(like_frames(mask_of(length_B, frames_BT.shape[1]), frames_BT), frames_BT, 0)


def like_frames(mask_BT: Tensor, frames_BT: Tensor) -> Tensor:
    """Reshape a mask `[B, T]` to broadcast with frames `[B, T, ...]`."""
    return mask_BT.reshape(*mask_BT.shape, *[1] * (frames_BT.ndim - 2))
