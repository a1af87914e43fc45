"""The network of `mutter` with the state of a large recogniser, which it only carries: to measure what states cost."""

import torch
from torch import Tensor

from benchmarks.models import mutter
from penstock import Application, Live
from penstock.nn.streaming import State, Step, Streaming

# Five recurrent layers of 2,560 units in bf16.
STATE_BYTES = 5 * 2_560 * 2


class Carried(Streaming):
    """Give what comes, and carry a state that nothing reads."""

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """Return the frames."""
        return whole_BT

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """Return the lengths."""
        return length_B

    def initial_state(self, batch: int) -> State:
        """Return zeros."""
        return torch.zeros(batch, STATE_BYTES // 4)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """Return the frames of a chunk."""
        return Step(chunk_BT, length_B, state)


def network():
    """Sixteen bands every 40 ms."""
    from penstock.nn import Sequential

    return Sequential(mutter.network(), Carried())


app = Application(
    name="ponder",
    description="A word every 400 ms of live sound, and the state of a large recogniser.",
    input=mutter.app.input,
    output=mutter.app.output,
    live=Live(rate_hz=mutter.RATE_HZ, events=mutter.events),
    chunks=mutter.app.chunks,
    model=":network",
)
