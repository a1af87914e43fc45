"""Layers that add to their input."""

from typing import final

from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.nn.streaming import Sequential, State, Step, Streaming
from penstock.nn.windows import Windowed


@final
class Residual(Streaming):
    """Layers whose input is added to their output: `x + layers(x)`.

    He et al. 2016, "Deep Residual Learning for Image Recognition", section 3.1.

    Args:
        layers: As of `Sequential`. Together they keep the shape of a frame; each gives a frame for each frame, at once.

    Raises:
        ApplicationError: A layer delays frames, or gives fewer of them.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = Sequential(*layers)
        for layer in self.layers.modules():
            if isinstance(layer, Windowed) and (
                layer.windows.stride > 1 or layer.windows.before < layer.windows.size - 1
            ):
                raise ApplicationError(
                    f"a Residual has a {type(layer).__name__}, which delays frames or gives fewer; its layers must "
                    f"give a frame for each frame, at once."
                )

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, ...]` to the same shape.

        Raises:
            ApplicationError: The layers change the shape.
        """
        return _added(whole_BT, self.layers(whole_BT, length_B))

    def initial_state(self, batch: int) -> State:
        """That of the layers."""
        return self.layers.initial_state(batch)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`.

        Raises:
            ApplicationError: The layers change the shape.
        """
        output_BU, _, after = self.layers.step(chunk_BT, length_B, state, last_B)
        return Step(_added(chunk_BT, output_BU), length_B, after)


def _added(frames_BT: Tensor, output_BU: Tensor) -> Tensor:
    if output_BU.shape != frames_BT.shape:
        raise ApplicationError(
            f"the layers of a Residual make {tuple(output_BU.shape)} of {tuple(frames_BT.shape)}; they must keep the "
            f"shape."
        )
    return frames_BT + output_BU
