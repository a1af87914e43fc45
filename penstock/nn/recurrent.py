"""Recurrent layers that run whole sequences by torch's fused kernels and chunks frame by frame, with the same weights.

A chunk has a few frames of many streams, and each stream may have a different number. The input part of all frames is
one matrix product; then each frame updates the rows that are long enough.
"""

from abc import abstractmethod
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.kernels.gru_gates import gru_gates
from penstock.nn.streaming import State, Step, Streaming

# B batch, T frames, H hidden units, G gates of all units


class Recurrent(Streaming):
    """A layer whose output for a frame is its hidden state after that frame."""

    hidden: int
    parts: ClassVar[int] = 1
    """Number of tensors `[B, H]` of the state."""

    @abstractmethod
    def inputs(self, chunk_BT: Tensor) -> Tensor:
        """Compute the input part of the gates of a chunk, `[B, T, G]`."""

    @abstractmethod
    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """Compute the state after one frame of the valid rows; its first tensor, `[B, H]`, is the output."""

    def initial_state(self, batch: int) -> State:
        """Zeros."""
        like = next(self.parameters())
        return tuple(like.new_zeros(batch, self.hidden) for _ in range(self.parts))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        now = cast(tuple[Tensor, ...], state)
        outputs: list[Tensor] = []
        for frame, input_BG in enumerate(self.inputs(chunk_BT).unbind(1)):
            now = self.advance(input_BG, now, length_B > frame)
            outputs.append(now[0])
        return Step(torch.stack(outputs, 1), length_B, now)


class Fused(Recurrent):
    """A layer that has a fused kernel in torch for whole sequences.

    Args:
        cell: Torch's module, with one layer and the batch first.
    """

    def __init__(self, cell: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.hidden = cell.hidden_size
        self.cell = cell

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to `[B, T, hidden]`."""
        return self.cell(whole_BT)[0] if whole_BT.shape[1] else whole_BT.new_zeros(len(whole_BT), 0, self.hidden)

    def inputs(self, chunk_BT: Tensor) -> Tensor:
        """See `Recurrent`."""
        input_weight, _, input_bias, _ = self.cell.all_weights[0]
        return functional.linear(chunk_BT, input_weight, input_bias)

    def recurrent(self, hidden_BH: Tensor) -> Tensor:
        """Compute the recurrent part of the gates, `[B, G]`."""
        _, weight, _, bias = self.cell.all_weights[0]
        return functional.linear(hidden_BH, weight, bias)


@final
class GRU(Fused):
    """Gated recurrent unit in torch's variant: the reset gate is applied after the hidden state's product.

    Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3; `torch.nn.GRU` has the
    formulas.

    Args:
        features: Features of a frame.
        hidden: Hidden units.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(nn.GRU(features, hidden, batch_first=True))

    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """See `Recurrent`."""
        (hidden_BH,) = state
        return (gru_gates(input_BG, self.recurrent(hidden_BH), hidden_BH, valid_B),)


@final
class LSTM(Fused):
    """Long short-term memory. Its state is the output and the cell.

    Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000; `torch.nn.LSTM` has the formulas.

    Args:
        features: Features of a frame.
        hidden: Hidden units.
    """

    parts: ClassVar[int] = 2

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(nn.LSTM(features, hidden, batch_first=True))

    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """See `Recurrent`."""
        output_BH, cell_BH = state
        gates_BG = input_BG + self.recurrent(output_BH)
        enter, forget, new, leave = gates_BG.chunk(4, 1)
        after_BH = torch.sigmoid(forget) * cell_BH + torch.sigmoid(enter) * torch.tanh(new)
        return _where(valid_B, (torch.sigmoid(leave) * torch.tanh(after_BH), after_BH), state)


@final
class ClippedRNN(Recurrent):
    """The plain recurrent layer of Deep Speech: h_t = clip(W x_t + U h_(t-1) + b, 0, most).

    Hannun et al. 2014, "Deep Speech", section 2, where `most` is 20.

    Args:
        features: Features of a frame.
        hidden: Hidden units.
        most: Upper bound of the activations.

    Raises:
        ApplicationError: `most` is not above 0.
    """

    def __init__(self, features: int, hidden: int, most: float = 20.0) -> None:
        super().__init__()
        if not most > 0:
            raise ApplicationError(f"ClippedRNN clips at {most:g}; give it a number above 0.")
        self.hidden = hidden
        self.most = most
        self.input = nn.Linear(features, hidden)
        self.recurrent = nn.Linear(hidden, hidden, bias=False)
        # An ungated recurrence that starts as a rotation preserves the norm of its signal.
        nn.init.orthogonal_(self.recurrent.weight)

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to `[B, T, hidden]`."""
        length_B = whole_BT.new_full((whole_BT.shape[0],), whole_BT.shape[1], dtype=torch.int64)
        if not whole_BT.shape[1]:
            return whole_BT.new_zeros(len(whole_BT), 0, self.hidden)
        return self.step(whole_BT, length_B, self.initial_state(whole_BT.shape[0])).output_BU

    def inputs(self, chunk_BT: Tensor) -> Tensor:
        """See `Recurrent`."""
        return self.input(chunk_BT)

    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """See `Recurrent`."""
        return _where(valid_B, ((input_BG + self.recurrent(state[0])).clamp(0, self.most),), state)


def _where(valid_B: Tensor, after: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(valid_B[:, None], new, old) for new, old in zip(after, before, strict=True))
