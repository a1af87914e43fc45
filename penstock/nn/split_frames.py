"""Frames that become several: layers that run at a lower rate than the outputs."""

from typing import final

from torch import Tensor

from penstock.core.errors import ApplicationError
from penstock.nn.streaming import State, Step, Streaming


@final
class SplitFrames(Streaming):
    """Each frame becomes several, one behind the other; stateless.

    Recurrent layers take as many steps as there are frames. Behind a convolution with a stride they take fewer, and a
    linear layer that makes the outputs of several frames at once, before this layer, has the rate of the outputs.

    Args:
        parts: Output frames of a frame.

    Raises:
        ApplicationError: `parts` is below 1.
    """

    def __init__(self, parts: int) -> None:
        if parts < 1:
            raise ApplicationError(f"SplitFrames has parts={parts}; it must be at least 1.")
        super().__init__()
        self.parts = parts

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, parts * F]` to `[B, parts * T, F]`."""
        return whole_BT.unflatten(2, (self.parts, whole_BT.shape[2] // self.parts)).flatten(1, 2)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """`parts` for each."""
        return length_B * self.parts

    def initial_state(self, batch: int) -> State:
        """Nothing."""
        return ()

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        return Step(self.forward(chunk_BT), self.output_lengths(length_B), state)
