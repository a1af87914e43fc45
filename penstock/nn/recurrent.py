"""Recurrent layers that run whole sequences by torch's fused kernels and chunks frame by frame, with the same weights.

A chunk has a few frames of many streams, and each stream may have a different number. The input part of all frames is
one matrix product; then each frame updates the rows that are long enough.
"""

from abc import abstractmethod
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.kernels.gru_gates import gru_gates
from penstock.kernels.gru_layer import gru_layer
from penstock.nn.streaming import State, Step, Streaming

# B batch, T frames, H hidden units, G gates of all units


class Recurrent(Streaming):
    """A recurrent layer of torch, whose output for a frame is its hidden state after that frame.

    Args:
        cell: Torch's module, with one layer and the batch first.
        parts: Number of tensors `[B, H]` of the state.
    """

    def __init__(self, cell: nn.GRU | nn.LSTM, parts: int = 1) -> None:
        super().__init__()
        self.hidden = cell.hidden_size
        self.parts = parts
        self.cell = cell

    @abstractmethod
    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """Compute the state after one frame of the valid rows; its first tensor, `[B, H]`, is the output."""

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to `[B, T, hidden]`."""
        return self.whole(whole_BT) if whole_BT.shape[1] else whole_BT.new_zeros(len(whole_BT), 0, self.hidden)

    def whole(self, whole_BT: Tensor) -> Tensor:
        """Compute the outputs of whole sequences of at least one frame."""
        return self.cell(whole_BT)[0]

    def initial_state(self, batch: int) -> State:
        """Zeros."""
        like = next(self.parameters())
        return tuple(like.new_zeros(batch, self.hidden) for _ in range(self.parts))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        input_weight, _, input_bias, _ = self.cell.all_weights[0]
        now = cast(tuple[Tensor, ...], state)
        outputs: list[Tensor] = []
        for frame, input_BG in enumerate(functional.linear(chunk_BT, input_weight, input_bias).unbind(1)):
            now = self.advance(input_BG, now, length_B > frame)
            outputs.append(now[0])
        return Step(torch.stack(outputs, 1), length_B, now)

    def recurrent(self, hidden_BH: Tensor) -> Tensor:
        """Compute the recurrent part of the gates, `[B, G]`."""
        _, weight, _, bias = self.cell.all_weights[0]
        return functional.linear(hidden_BH, weight, bias)


@final
class GRU(Recurrent):
    """Gated recurrent unit in torch's variant: the reset gate is applied after the hidden state's product.

    Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3; `torch.nn.GRU` has the
    formulas.

    Args:
        features: Features of a frame.
        hidden: Hidden units.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(nn.GRU(features, hidden, batch_first=True))

    def whole(self, whole_BT: Tensor) -> Tensor:
        """See `Recurrent`."""
        return gru_layer(whole_BT, cast(nn.GRU, self.cell))

    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """See `Recurrent`."""
        (hidden_BH,) = state
        return (gru_gates(input_BG, self.recurrent(hidden_BH), hidden_BH, valid_B),)


@final
class LSTM(Recurrent):
    """Long short-term memory. Its state is the output and the cell.

    Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000; `torch.nn.LSTM` has the formulas.

    Args:
        features: Features of a frame.
        hidden: Hidden units.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(nn.LSTM(features, hidden, batch_first=True), parts=2)

    def advance(self, input_BG: Tensor, state: tuple[Tensor, ...], valid_B: Tensor) -> tuple[Tensor, ...]:
        """See `Recurrent`."""
        output_BH, cell_BH = state
        gates_BG = input_BG + self.recurrent(output_BH)
        enter, forget, new, leave = gates_BG.chunk(4, 1)
        after_BH = torch.sigmoid(forget) * cell_BH + torch.sigmoid(enter) * torch.tanh(new)
        made = torch.sigmoid(leave) * torch.tanh(after_BH), after_BH
        return tuple(torch.where(valid_B[:, None], now, before) for now, before in zip(made, state, strict=True))
