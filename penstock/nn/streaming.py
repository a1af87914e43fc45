"""Layers over time that are trained on whole sequences and served a chunk at a time, with the same answers.

What a layer remembers between two chunks is a value that it is given and gives back, never an attribute: a stream's
state can then be joined into a batch with others, parted again, saved, and continued elsewhere.

For every layer here, however a sequence is cut into chunks, the outputs of the steps, put behind one another, are
`forward` of the whole sequence. A row's outputs depend on nothing but its own chunks: not on its neighbours, on what
stands in a chunk beyond the row's length, or on how long the chunks of the batch are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

# B batch, T frames of a chunk, U frames that come of them

# A tensor with the batch first, or a tuple of such trees. A layer without memory has ().
State: TypeAlias = "Tensor | tuple[State, ...]"


class Step(NamedTuple):
    """What came of one chunk.

    Args:
        output_BU: `[B, U, ...]`, the frames of each row from its first on; what follows them means nothing.
        length_B: How many frames of each row there are, int64.
        state: What to give to the next step.
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
            length_B: How many frames of each row are valid, int64; all of them by default. What follows them changes no
                valid output.

        Returns:
            `[B, U, ...]`, of which each row has `output_lengths(length_B)` valid frames.
        """

    @abstractmethod
    def output_lengths(self, length_B: Tensor) -> Tensor:
        """How many frames come of whole sequences of so many."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state of so many streams before their first chunk, where the parameters are and in their precision."""

    @abstractmethod
    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """Run over the next chunk of each row.

        Args:
            chunk_BT: `[B, T, ...]` with T from 1.
            length_B: How many frames of each row are valid, int64, 0 to T. A row of 0 whose stream does not end has no
                output, and its state stays what it was, bit for bit.
            state: What the step before gave.
            last_B: Bool; where a stream ends with this chunk, so that what was held back for its future comes too. None
                where no stream does.
        """


class Sequential(Streaming):
    """Layers one after the other; the state is the tuple of theirs.

    Args:
        layers: In the order in which they run. A plain module is run on each frame alone: it must not look at others.
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
        """Through all layers."""
        for layer in self._streaming():
            length_B = layer.output_lengths(length_B)
        return length_B

    def initial_state(self, batch: int) -> State:
        """Those of the layers."""
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
    """A layer that treats every frame alone, such as a linear layer, layer norm or an activation: it has no state.

    Args:
        module: Takes `[B, T, ...]`, and lets no frame see another.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, ...]` to `[B, T, ...]`."""
        return self.module(whole_BT)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """As many as went in."""
        return length_B

    def initial_state(self, batch: int) -> State:
        """None."""
        return ()

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        return Step(self.module(chunk_BT), length_B, state)


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """A state whose every leaf is what the function makes of it: to move it, to choose rows, to change precision."""
    if isinstance(state, Tensor):
        return function(state)
    return tuple(map_state(function, part) for part in state)


def leaves(state: State) -> list[Tensor]:
    """Every tensor of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


def mask_of(length_B: Tensor, frames: int) -> Tensor:
    """Bool `[B, T]`: which of so many frames are valid."""
    return torch.arange(frames, device=length_B.device) < length_B[:, None]


def valid_alone(frames_BT: Tensor, length_B: Tensor | None) -> Tensor:
    """Frames with zeros for what is not valid."""
    if length_B is None:
        return frames_BT
    return torch.where(like_frames(mask_of(length_B, frames_BT.shape[1]), frames_BT), frames_BT, 0)


def like_frames(mask_BT: Tensor, frames_BT: Tensor) -> Tensor:
    """A mask `[B, T]` in a shape that goes with frames `[B, T, ...]`."""
    return mask_BT.reshape(*mask_BT.shape, *[1] * (frames_BT.ndim - 2))
