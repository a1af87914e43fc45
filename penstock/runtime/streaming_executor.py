"""Steps a streaming network for the streams of a batch: their states are joined for the step and parted again behind
it.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.core.spec import Array, TensorSpec
from penstock.nn.streaming import State, Step, Streaming
from penstock.runtime.executor import Batch, Executor, Result
from penstock.runtime.state_table import StateTable
from penstock.runtime.torch_executor import served_function

# B rows of the batch, T frames of a chunk, U frames that come of them

# What `Streaming.step` does: of a chunk, the lengths, the states and whose stream ends.
RunStep: TypeAlias = Callable[[Tensor, Tensor, State, Tensor], Step]


@final
class Stateless(Streaming):
    """A one-shot network as a streaming one whose streams have one chunk and no state.

    Args:
        module: The network; where it has `predict`, that is what is served.
        frames: Of an output, along its first dimension.
    """

    def __init__(self, module: nn.Module, frames: int) -> None:
        super().__init__()
        self.module = module
        self._frames = frames

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """What is served of a batch of raw inputs."""
        return served_function(self.module)(whole_BT)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """All of an output is valid."""
        return torch.full_like(length_B, self._frames)

    def initial_state(self, batch: int) -> State:
        """None."""
        return ()

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        return Step(self(chunk_BT), self.output_lengths(length_B), ())


@final
class JoinedNetwork:
    """A streaming network beside the states of its streams.

    Args:
        module: The network; a copy of it is run, as it is when served, without gradients.
        input: One raw chunk, its frames first.
        output: What comes of one chunk at most, its frames first.
        slots: How many streams there may be.
        device: Where the network runs.
        dtype: In which precision it and its states are; that of its parameters by default.
        run: Does what its `step` does; that itself by default.

    Raises:
        ApplicationError: The network makes something else of a chunk than the output.
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
        self.device = torch.device(device)
        own = copy.deepcopy(module).to(self.device, dtype).eval().requires_grad_(False)
        floats = [parameter.dtype for parameter in own.parameters() if parameter.is_floating_point()]
        self._precision = floats[0] if floats else torch.get_default_dtype()
        self._run: RunStep = run or own.step
        with torch.inference_mode():
            self.states = StateTable(own, slots)
            self._check(input, output)

    def step(self, chunk_BT: Tensor, slot_B: Tensor, length_B: Tensor, fresh_B: Tensor, last_B: Tensor) -> Step:
        """Join the rows' states, run the network once, part them again; every tensor where the network is."""
        # Whole numbers are samples or indices, of which the network makes what it wants.
        given_BT = chunk_BT.to(self._precision) if chunk_BT.is_floating_point() else chunk_BT
        step = self._run(given_BT, length_B, self.states.joined(slot_B, fresh_B), last_B)
        self.states.part(slot_B, step.state)
        return step

    def run_by(self, run: RunStep) -> Self:
        """The same network beside the same states, its `step` done by something else."""
        other = copy.copy(self)
        other._run = run
        return other

    def _check(self, input: TensorSpec, output: TensorSpec) -> None:
        kind = getattr(torch, input.dtype)
        chunk_BT = torch.zeros(1, *input.shape, dtype=kind, device=self.device)
        nowhere = torch.full((1,), self.states.slots, device=self.device)
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        step = self.step(chunk_BT, nowhere, nothing, nothing == 0, nothing != 0)
        if step.output_BU.shape[1:] != output.shape:
            raise ApplicationError(
                f"The network makes {list(step.output_BU.shape[1:])} of a chunk of {input.describe()}; the output is "
                f"{output.describe()}."
            )


@final
class StreamingExecutor(Executor):
    """A streaming network and the states of all its streams, each step started anew, on the CPU.

    Args:
        module: The network; a copy of it is run, as it is when served, without gradients.
        input: One raw chunk, its frames first.
        output: What comes of one chunk at most, its frames first.
        slots: How many streams there may be.
        max_rows: The largest batch.
        dtype: In which precision the network and its states are; that of its parameters by default.
        exact: Fill every batch up to the largest, also past the slots. Libraries choose the order in which they add by
            a batch's size, and treat the last rows of an odd one by themselves; so that in batches of one size, 32 or a
            multiple of it, a row's answer is the same, bit for bit, whatever else is there and wherever it stands.
        run: Does what the network's `step` does; that itself by default.

    Raises:
        ApplicationError: The network makes something else of a chunk than the output.
    """

    runs_ahead = True

    def __init__(
        self,
        module: Streaming,
        input: TensorSpec,
        output: TensorSpec,
        *,
        slots: int,
        max_rows: int,
        dtype: torch.dtype | None = None,
        exact: bool = False,
        run: RunStep | None = None,
    ) -> None:
        self.input, self.output = input, output
        self.max_rows = min(max_rows, slots)
        self._slots = slots
        self._filled_rows = max_rows if exact else 0
        self._network = JoinedNetwork(module, input, output, slots=slots, dtype=dtype, run=run)
        self._kind = getattr(torch, output.dtype)

    @property
    def state_bytes(self) -> int:
        """What one stream's state takes."""
        return self._network.states.nbytes_each

    def run_by(self, run: RunStep) -> Self:
        """Another executor of the same streams, by something else that does the network's `step`."""
        other = copy.copy(self)
        other._network = self._network.run_by(run)
        return other

    @torch.inference_mode()
    def step(self, batch: Batch) -> Result:
        """See `Executor`."""
        rows = batch.slots_B.size
        last_B = np.zeros(rows, np.bool_) if batch.last_B is None else batch.last_B
        columns = batch.chunk_B, batch.slots_B, batch.length_B, batch.fresh_B, last_B
        if self._filled_rows:
            nobody = 0, self._slots, 0, False, False
            columns = (_filled(*each, self._filled_rows) for each in zip(columns, nobody, strict=True))
        step = self._network.step(*map(torch.from_numpy, columns))
        output_B, length_B = step.output_BU[:rows].to(self._kind), step.length_B[:rows]
        return Result(output_B=output_B.numpy(), length_B=length_B.numpy())

    def saved(self, slot: int) -> list[Tensor]:
        """See `StateTable`."""
        return self._network.states.saved(slot)

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """See `StateTable`."""
        self._network.states.restore(slot, saved)


def _filled(column_B: Array, value: int, rows: int) -> Array:
    """A column with a value for the rows that are missing."""
    filled = np.full((rows, *column_B.shape[1:]), value, column_B.dtype)
    filled[: len(column_B)] = column_B
    return filled
