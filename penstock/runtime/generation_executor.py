"""Answers that take steps, run by torch: begin rows, step all rows in progress, let rows join and leave."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.errors import ApplicationError
from penstock.core.generate import END as NETWORK_END
from penstock.core.generate import MAX_STEPS
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generating import Generating, GenerationStep
from penstock.runtime.generating_network import GeneratingNetwork
from penstock.runtime.generation_state import (
    Mask,
    Rows,
    RowsState,
    StateLayout,
    for_step,
    joined,
    kept,
    lengths_on,
    part_of,
    stepped,
    with_own_memory,
    with_room,
)

# B rows of a batch or in progress

# Rows in progress that one batch may have.
MAX_ROWS = 256


class GeneratedStep(NamedTuple):
    """One step of a batch of requests.

    Args:
        rows_B: The requests that still run, as indices of the batch.
        output_B: Their outputs.
        ended: Their reason to end with this step; None for those that go on.
    """

    rows_B: Rows
    output_B: Array
    ended: list[str | None]


@final
class GenerationExecutor(Generating):
    """A network whose answers take steps.

    Args:
        module: The network, in evaluation mode, on `device`.
        application: Its application, which has `generate`.
        max_rows: The most rows in progress.
        device: torch's name of the device.
        dtype: The dtype of autocast; None for none.
        padding: What new room for floats is filled with; tests poison it.

    Raises:
        ApplicationError: The network does not have the functions or the inputs that are declared.
    """

    def __init__(
        self,
        module: nn.Module,
        application: Application,
        max_rows: int = MAX_ROWS,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        padding: float = 0.0,
    ) -> None:
        assert application.generate is not None, application.name
        self.input, self.output, self.answer = application.input, application.output, application.answer
        self.max_rows = max_rows
        self.max_steps = application.generate.max_steps
        self._limit_input = application.generate.max_steps_input
        self._layout = StateLayout(application.generate, application.input, padding)
        self._network = GeneratingNetwork(module, application, self._layout)
        self._device = torch.device(device)
        self._autocast = partial(torch.autocast, self._device.type, dtype, enabled=dtype is not None)
        self._outputs = {spec.name: getattr(torch, spec.dtype) for spec in application.outputs.values()}

    def limits(self, chunk_B: Array) -> Rows:
        """The maximum of steps of each request, `[B]`."""
        if self._limit_input is None:
            return np.full(len(chunk_B), self.max_steps)
        asked_B = chunk_B[self._limit_input] if isinstance(self.input, RecordSpec) else chunk_B
        return np.clip(asked_B.astype(np.int64), 1, self.max_steps)

    @torch.inference_mode()
    def begin(self, chunk_B: Array) -> RowsState:
        """Begin the answers to raw inputs `[B, *input.shape]`."""
        rows, layout = len(chunk_B), self._layout
        feeds, lengths = feeds_of(self.input, chunk_B)
        given = {name: torch.from_numpy(array).to(self._device) for name, array in (feeds | lengths).items()}
        with self._autocast():
            tensors = self._network.begin(given, rows)
        # Copies: a network may count its lengths in place.
        grown = {name: tensors[name].cpu().numpy().copy() for name in layout.growing}
        all_lengths = {**lengths, **grown}
        self._check_lengths(tensors, all_lengths)
        tensors |= lengths_on(lengths, lengths, self._device)
        state = RowsState(rows=rows, tensors=tensors, lengths=all_lengths, room={})
        # Networks write what grows in place, and the tensors of `begin` may share memory, or be the network's own.
        return with_own_memory(layout, with_room(layout, state, layout.room(all_lengths)))

    def _check_lengths(self, tensors: Mapping[str, Tensor], lengths: Mapping[str, Rows]) -> None:
        for name, axes in self._layout.axes.items():
            for axis, dim in axes:
                size = min(tensors[name].shape[axis], int(self._layout.dims[dim]))
                if ((lengths[dim] < 0) | (lengths[dim] > size)).any():
                    raise ApplicationError(
                        f"the network's begin gives {name!r} with room for {size:,} {dim}, but the lengths "
                        f"{lengths[dim].tolist()!r:.80}; the lengths must be from 0 to that room."
                    )

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
        """Run the network once for all rows of a state, none of which may be full."""
        layout = self._layout
        needed = layout.room(state.lengths)
        # Room shrinks where rows leave, and not here.
        state = with_room(layout, state, {name: max(size, state.room[name]) for name, size in needed.items()})
        with self._autocast():
            outputs, after, done_B = self._network.step(for_step(layout, state))
        # The one wait for the device: outputs, then what is there by then.
        named = {
            name: tensor.to("cpu", self._outputs[name]).numpy()
            for name, tensor in zip(self._outputs, outputs, strict=True)
        }
        grown = {name: after[name].cpu().numpy().copy() for name in layout.growing}
        full_B = np.zeros(state.rows, np.bool_)
        for name, dim in layout.growing.items():
            full_B |= grown[name] >= int(dim)
        output_B = chunks_of(self.output, named, {})
        return GenerationStep(stepped(state, after, grown), output_B, done_B.cpu().numpy(), full_B)

    def run(self, chunk_B: Array) -> Iterator[GeneratedStep]:
        """Run a batch of requests to the end of their answers; yield each step."""
        state, limits_B = self.begin(chunk_B), self.limits(chunk_B)
        rows_B: Rows = np.arange(len(chunk_B))
        steps = 0
        while rows_B.size:
            steps += 1
            state, output_B, done_B, full_B = self.step(state)
            over_B = done_B | full_B | (steps >= limits_B)
            reasons = np.where(done_B, NETWORK_END, MAX_STEPS)
            ended = [str(reason) if over else None for reason, over in zip(reasons, over_B, strict=True)]
            yield GeneratedStep(rows_B, output_B, ended)
            if over_B.all():
                return
            if over_B.any():
                state, order = self.keep(state, ~over_B)
                rows_B, limits_B = rows_B[order], limits_B[order]

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns whole answers, records `[B]`, see `Application.answer`."""
        assert isinstance(self.answer, RecordSpec)
        answers = self.answer.empty(len(chunk_B))
        for step in self.run(chunk_B):
            place_B = answers["steps"][step.rows_B]
            for spec in self.answer.tensors:
                output_B = step.output_B[spec.name] if isinstance(self.output, RecordSpec) else step.output_B
                answers[spec.name][step.rows_B, place_B] = output_B
            answers["steps"][step.rows_B] = place_B + 1
        return answers


def generated_outputs(executor: GenerationExecutor, chunk_B: Array, *, single: bool) -> Iterator[Any]:
    """Yield the outputs of each step of a batch: of one request, or a list with None for the answers that ended."""
    spec = executor.output
    for step in executor.run(chunk_B):
        outputs: list[Any] = [None] * len(chunk_B)
        for row, output in zip(step.rows_B, step.output_B, strict=True):
            outputs[row] = spec.unpack(output) if isinstance(spec, RecordSpec) else np.array(output)
        yield outputs[0] if single else outputs
