"""Answers that take steps, run by torch: begin rows, step all rows in progress, let rows join and leave."""

from collections.abc import Callable
from functools import partial
from typing import final

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.errors import ApplicationError
from penstock.core.named_arrays import SHORTEST_ROOM, chunks_of, feeds_of
from penstock.core.spec import Array
from penstock.core.state_layout import PAGE, StateLayout
from penstock.runtime.generation.generating import GeneratingInTurn, GenerationStep
from penstock.runtime.generation.generating_network import GeneratingNetwork
from penstock.runtime.generation.generation_state import (
    Mask,
    Rows,
    RowsState,
    check_lengths,
    for_step,
    joined,
    kept,
    lengths_on,
    part_of,
    stepped,
    with_own_memory,
    with_room,
)
from penstock.runtime.gpu.precision import computing
from penstock.runtime.torch_threads import use_threads

# B rows of a batch or in progress

# Rows in progress that one batch may have.
MAX_ROWS = 256


@final
class GenerationExecutor(GeneratingInTurn):
    """A network whose answers take steps.

    Args:
        module: The network, in evaluation mode, on `device`.
        application: Its application, which has `generate`.
        max_rows: The most rows in progress.
        device: torch's name of the device.
        precision: As in `GpuWay`.
        padding: What new room for floats is filled with; tests poison it.
        exact: Give tensors no more room than the longest row needs, as the check of a bundle does.

    Raises:
        ApplicationError: The network does not have the functions or the inputs that are declared.
    """

    def __init__(
        self,
        module: nn.Module,
        application: Application,
        max_rows: int = MAX_ROWS,
        device: str = "cpu",
        precision: str = "fp32",
        padding: float = 0.0,
        exact: bool = False,
    ) -> None:
        super().__init__(application, max_rows)
        assert application.generate is not None, application.name
        self._layout = StateLayout(application.generate, application.input, padding, 1 if exact else PAGE)
        self._shortest_room = 1 if exact else SHORTEST_ROOM
        self._network = GeneratingNetwork(module, application, self._layout)
        self._device = torch.device(device)
        self._computing = partial(computing, precision, self._device.type)
        self._outputs = {spec.name: getattr(torch, spec.dtype) for spec in application.outputs.values()}

    @torch.inference_mode()
    def begin(self, chunk_B: Array) -> RowsState:
        """Begin the answers to raw inputs `[B, *input.shape]`."""
        use_threads(self.threads)
        rows, layout = len(chunk_B), self._layout
        feeds, lengths = feeds_of(self.input, chunk_B, self._shortest_room)
        given = {name: torch.from_numpy(array).to(self._device) for name, array in (feeds | lengths).items()}
        with self._computing():
            tensors = self._network.begin(given, rows)
        # Copies: a network may count its lengths in place.
        grown = {name: tensors[name].cpu().numpy().copy() for name in layout.growing}
        all_lengths = {**lengths, **grown}
        check_lengths(layout, tensors, all_lengths)
        tensors |= lengths_on(lengths, lengths, self._device)
        state = RowsState(rows=rows, tensors=tensors, lengths=all_lengths, room={})
        # Networks write what grows in place, and the tensors of `begin` may share memory, or be the network's own.
        return with_own_memory(layout, with_room(layout, state, layout.room(all_lengths)))

    @torch.inference_mode()
    def join(self, states: list[RowsState]) -> RowsState:
        """Put the rows of several states into one, in order. The first must not be used any more."""
        return joined(self._layout, states, max_rows=self.max_rows)

    @torch.inference_mode()
    def keep(self, state: RowsState, keep_B: Mask) -> tuple[RowsState, Rows]:
        """Let rows leave; returns the state of the others, and the place that each had. The state is used up."""
        return kept(self._layout, state, keep_B)

    @torch.inference_mode()
    def part(self, state: RowsState, rows_B: Rows) -> RowsState:
        """Copy some rows of a state."""
        return part_of(state, rows_B)

    @torch.inference_mode()
    def step(self, state: RowsState) -> GenerationStep:
        """Run the network once for all rows of a state. No row may be full."""
        use_threads(self.threads)
        layout = self._layout
        needed = layout.room(state.lengths)
        # Room shrinks where rows leave, and not here.
        state = with_room(layout, state, {name: max(size, state.room[name]) for name, size in needed.items()})
        with self._computing():
            outputs, after, done_B = self._network.step(for_step(layout, state))
        # The one wait for the device: outputs, then what is there by then.
        named = {
            name: tensor.to("cpu", self._outputs[name]).numpy()
            for name, tensor in zip(self._outputs, outputs, strict=True)
        }
        grown = {name: after[name].cpu().numpy().copy() for name in layout.growing}
        full_B = np.zeros(state.rows, np.bool_)
        for name, dim in layout.growing.items():
            if (grown[name] < 0).any():
                raise ApplicationError(
                    f"the network's step gives the lengths {grown[name].tolist()!r:.80} as {name!r} of the state; they "
                    f"must be 0 or more."
                )
            full_B |= grown[name] >= int(dim)
        output_B = chunks_of(self.output, named, {})
        return GenerationStep(stepped(state, after, grown), output_B, done_B.cpu().numpy(), full_B)

    def rehearsal(self, chunk: Array, rows: int) -> Callable[[], object]:
        """See `Generating`. The same step again and again: it writes the same entries."""
        state = self.part(self.begin(np.asarray(chunk).reshape(1, *self.input.shape)), np.zeros(rows, np.int64))
        return lambda: self.step(state)

    def begin_alone(self, chunk_B: Array) -> None:
        """See `Generating`."""
        self.begin(chunk_B)
