"""Steps of a streaming network for a batch of streams: gather their states, run the network, scatter the states."""

import copy
from collections.abc import Callable
from typing import Self, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.core.spec import Array, TensorSpec
from penstock.nn.streaming import State, Step, Streaming
from penstock.runtime.executor import Executor, Rows, StepInput, StepOutput
from penstock.runtime.named_network import served_function
from penstock.runtime.state_table import StateTable
from penstock.runtime.torch_threads import use_threads

# B rows of the batch, T frames of a chunk, U frames that come of them

# The signature of `Streaming.step`: chunks, lengths, states, and the rows whose stream ends.
RunStep: TypeAlias = Callable[[Tensor, Tensor, State, Tensor], Step]


@final
class Stateless(Streaming):
    """A one-shot network as a streaming network with streams of one chunk and no state.

    Args:
        module: The network; its `predict` is served where it has one.
        frames: Frames of an output, along its first dimension.
    """

    def __init__(self, module: nn.Module, frames: int) -> None:
        super().__init__()
        self.module = module
        self._frames = frames

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """Run the served function on a batch of raw inputs."""
        return served_function(self.module)(whole_BT)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """All frames of an output are valid."""
        return torch.full_like(length_B, self._frames)

    def initial_state(self, batch: int) -> State:
        """Return the empty state."""
        return ()

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        return Step(self(chunk_BT), self.output_lengths(length_B), ())


@final
class StatefulNetwork:
    """A streaming network and the states of its streams.

    Args:
        module: The network; a copy of it runs, in evaluation mode and without gradients.
        input: One raw chunk, frames first.
        output: The largest output of one chunk, frames first.
        slots: The number of streams.
        device: Device of the network.
        dtype: Precision of the network and its states; that of its parameters by default.
        run: A replacement of the network's `step`, which gets chunks in their declared dtype.

    Attributes:
        states: The states of the streams.
        state_layout: The precision of the network, and what one state consists of.

    Raises:
        ApplicationError: The network's output for a chunk has another shape.
    """

    def __init__(
        self,
        module: Streaming,
        input: TensorSpec,
        output: TensorSpec,
        *,
        slots: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        run: RunStep | None = None,
    ) -> None:
        self.input, self.output = input, output
        asked = torch.device(device)
        # With its index, because the current device is per thread.
        self.device = torch.device("cuda", asked.index or 0) if asked.type == "cuda" else asked
        own = copy.deepcopy(module).to(self.device, dtype).eval().requires_grad_(False)
        floats = [parameter.dtype for parameter in own.parameters() if parameter.is_floating_point()]
        # None where chunks stay as they are declared: such a step converts them itself.
        self._precision = None if run else floats[0] if floats else torch.get_default_dtype()
        self._run: RunStep = run or own.step
        with torch.inference_mode():
            self.states = StateTable(own, slots)
            self._check()
        precision = str(floats[0] if floats else self._precision).removeprefix("torch.")
        self.state_layout = f"{precision} {self.states.layout}"

    def step(self, chunk_BT: Tensor, slot_B: Tensor, length_B: Tensor, fresh_B: Tensor, last_B: Tensor) -> Step:
        """Gather the rows' states, run the network once, scatter them; all tensors are on the network's device."""
        # Integers are samples or indices, which the network converts itself.
        given_BT = chunk_BT.to(self._precision) if self._precision and chunk_BT.is_floating_point() else chunk_BT
        step = self._run(given_BT, length_B, self.states.gather(slot_B, fresh_B), last_B)
        self.states.scatter(slot_B, step.state)
        return step

    def run_by(self, run: RunStep) -> Self:
        """Return the same network and states with another `step`."""
        other = copy.copy(self)
        other._run = run
        return other

    def _check(self) -> None:
        kind = getattr(torch, self.input.dtype)
        chunk_BT = torch.zeros(1, *self.input.shape, dtype=kind, device=self.device)
        scratch = torch.full((1,), self.states.slots, device=self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        step = self.step(chunk_BT, scratch, zero, zero == 0, zero != 0)
        if step.output_BU.shape[1:] != self.output.shape:
            raise ApplicationError(
                f"The network gives {list(step.output_BU.shape[1:])} for a chunk of {self.input.describe()}; it must "
                f"give {self.output.describe()}."
            )


@final
class StreamingExecutor(Executor):
    """A streaming network and the states of all its streams, run eagerly on the CPU.

    Args:
        network: The network with the states, on the CPU.
        max_rows: The largest batch.
        exact: Pad every batch to the largest, also beyond the slots. Libraries choose their order of summation by the
            batch size, and treat the last rows of an odd size differently. In batches of one size, a multiple of 32, an
            answer is bitwise independent of the other rows and of its position.

    Attributes:
        network: As above.
        states: The states of the streams.
    """

    runs_ahead = True

    def __init__(self, network: StatefulNetwork, *, max_rows: int, exact: bool = False) -> None:
        self.input, self.output = network.input, network.output
        self.network, self.states = network, network.states
        self.max_rows = min(max_rows, self.states.slots)
        self.state_bytes, self.state_layout = self.states.row_bytes, network.state_layout
        self._padded_rows = max_rows if exact else 0
        self._kind = getattr(torch, network.output.dtype)

    @torch.inference_mode()
    def step(self, batch: StepInput) -> StepOutput:
        """See `Executor`."""
        use_threads(self.threads)
        rows = batch.slots_B.size
        last_B = np.zeros(rows, np.bool_) if batch.last_B is None else batch.last_B
        columns = batch.chunk_B, batch.slots_B, batch.length_B, batch.fresh_B, last_B
        if self._padded_rows:
            padding = 0, self.states.slots, 0, False, False
            columns = (_padded(*each, self._padded_rows) for each in zip(columns, padding, strict=True))
        step = self.network.step(*map(torch.from_numpy, columns))
        output_B, length_B = step.output_BU[:rows].to(self._kind), step.length_B[:rows]
        return StepOutput(output_B=output_B.numpy(), length_B=length_B.numpy())

    @torch.inference_mode()
    def begin_read(self, slots_B: Rows) -> Array:
        """See `Executor`."""
        return self.states.pack(torch.from_numpy(slots_B)).numpy()

    @torch.inference_mode()
    def write_states(self, slots_B: Rows, state_BS: Array) -> None:
        """See `Executor`."""
        self.states.unpack(torch.from_numpy(slots_B), torch.from_numpy(state_BS))


def _padded(column_B: Array, value: int, rows: int) -> Array:
    padded = np.full((rows, *column_B.shape[1:]), value, column_B.dtype)
    padded[: len(column_B)] = column_B
    return padded
