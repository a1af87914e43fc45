"""The loop over a pack's two graphs whose answers take steps: `begin` once, then `step` until the answer ends.

The graph of `begin` takes the inputs as the graph of a one-shot pack does, and gives the state, each name behind
`next.`. The graph of `step` takes the state, each name behind `state.`, and gives the outputs, `step.done`, and the new
state; what it does not give stays as it is. The lengths of dimensions that vary are in the state, int64 `[1]`.

`device/web/generation.js` is the same in JavaScript.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from penstock.core.generate import END, MAX_STEPS, STEPS, Generate, whole_answer
from penstock.core.packs.pack_tensors import PackTensors
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.core.state_layout import StateLayout

# Before the names of the state in the graphs.
STATE, NEXT = "state.", "next."
DONE = "step.done"


class GraphSession(Protocol):
    """A graph, opened by ONNX Runtime."""

    def run(self, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Run the graph once; returns the outputs of these names."""
        ...

    def get_outputs(self) -> list[Any]:
        """Describe the graph's outputs, each with its `name`."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """The state of one answer between two steps.

    Args:
        arrays: The state by name, `[1, ...]`, and the lengths `[1]`.
        room: Sizes of the dimensions that vary.
        steps: Steps taken.
        max_steps: The maximum of steps of this answer.
    """

    arrays: dict[str, Array]
    room: dict[str, int]
    steps: int
    max_steps: int


class LoopStep(NamedTuple):
    """One step of an answer.

    Args:
        output: The output of this step, an array or a record of no dimensions.
        state: The state after it.
        ended: Reason why the answer ended with this step, `"end"` or `"max_steps"`; None if it goes on.
    """

    output: Array
    state: LoopState
    ended: str | None


@final
@dataclass(frozen=True, kw_only=True)
class PackLoop:
    """Answers that take steps, one at a time, by two graphs.

    Args:
        begin_session: The graph of `begin`.
        step_session: The graph of `step`.
        tensors: The inputs, and the outputs of one step.
        generate: The declaration of the state.
    """

    begin_session: GraphSession
    step_session: GraphSession
    tensors: PackTensors
    generate: Generate
    whole: RecordSpec = field(init=False)
    layout: StateLayout = field(init=False)
    _changed: list[str] = field(init=False)

    def __post_init__(self) -> None:
        given = self.tensors.input
        # What a `prepare` makes has a fixed size.
        layout = StateLayout(self.generate, RecordSpec(()) if isinstance(given, RawSpec) else given)
        object.__setattr__(self, "whole", whole_answer(self.tensors.outputs, self.generate.max_steps))
        object.__setattr__(self, "layout", layout)
        made = {output.name for output in self.step_session.get_outputs()}
        object.__setattr__(self, "_changed", [name for name in layout.names if NEXT + name in made])

    def begin(self, given: Array) -> LoopState:
        """Begin the answer to one input without a batch dimension."""
        feeds, lengths = self.tensors.feeds(given)
        names = self.layout.names
        found = self.begin_session.run([NEXT + name for name in names], feeds)
        arrays = dict(zip(names, found, strict=True)) | lengths
        return LoopState(arrays=arrays, room={}, steps=0, max_steps=self._limit(given))

    def feeds(self, state: LoopState) -> tuple[dict[str, Array], dict[str, int]]:
        """Return the inputs of the graph of `step`, and the sizes of the dimensions that vary among them."""
        needed = self.layout.room({name: state.arrays[name] for name in self.layout.dims})
        room = {name: max(size, state.room.get(name, 0)) for name, size in needed.items()}
        axes = self.layout.axes
        feeds = {STATE + name: _with_room(state.arrays[name], axes.get(name, []), room) for name in self.layout.given}
        return feeds, room

    def step(self, state: LoopState) -> LoopStep:
        """Take one step of an answer that has not ended."""
        feeds, room = self.feeds(state)
        names = [*self.tensors.names, DONE, *(NEXT + name for name in self._changed)]
        results = dict(zip(names, self.step_session.run(names, feeds), strict=True))
        (output,) = self.tensors.answer([results[name] for name in self.tensors.names], {})
        # Tensors that the graph does not give keep their new room.
        arrays = {name: results.get(NEXT + name, feeds[STATE + name]) for name in self.layout.given}
        after = LoopState(arrays=arrays, room=room, steps=state.steps + 1, max_steps=state.max_steps)
        return LoopStep(output, after, self._ended(bool(results[DONE][0]), after))

    def answer(self, given: Array) -> Array:
        """Return the whole answer to one input, a record of no dimensions."""
        return self.stacked([step.output for step in self.steps(given)])

    def steps(self, given: Array) -> Iterator[LoopStep]:
        """Yield each step of the answer to one input."""
        state = self.begin(given)
        while True:
            step = self.step(state)
            yield step
            if step.ended is not None:
                return
            state = step.state

    def stacked(self, outputs: list[Array]) -> Array:
        """Return the outputs of all steps as a whole answer, a record of no dimensions."""
        one = self.tensors.output
        arrays = {spec.name: np.stack([_part(one, output, spec.name) for output in outputs]) for spec in one.tensors}
        records = self.whole.records(
            {name: array[None] for name, array in arrays.items()}, {STEPS: np.array([len(outputs)])}
        )
        return records.reshape(())

    def _limit(self, given: Array) -> int:
        most, name = self.generate.max_steps, self.generate.max_steps_input
        if name is None:
            return most
        asked = given[name] if isinstance(self.tensors.input, RecordSpec) else given
        return min(max(1, int(asked)), most)

    def _ended(self, done: bool, state: LoopState) -> str | None:
        if done:
            return END
        is_full = any(int(state.arrays[name][0]) >= int(dim) for name, dim in self.layout.growing.items())
        return MAX_STEPS if is_full or state.steps >= state.max_steps else None


def _part(spec: ChunkSpec, output: Array, name: str) -> Array:
    return output[name] if isinstance(spec, RecordSpec) else output


def _with_room(array: Array, axes: list[tuple[int, str]], room: Mapping[str, int]) -> Array:
    """Cut or pad an array to the sizes of its dimensions that vary."""
    sizes = list(array.shape)
    for axis, dim in axes:
        sizes[axis] = room[dim]
    if sizes == list(array.shape):
        return array
    made = np.zeros(sizes, array.dtype)
    common = tuple(slice(min(old, new)) for old, new in zip(array.shape, sizes, strict=True))
    made[common] = array[common]
    return made
