"""Answers that take steps, on a GPU: steps and beginnings are CUDA graphs, launched before earlier results are there.

Each row has a place in buffers that never move (`generation_places`), and a step is one graph by the number of places
and the room of each dimension (`generation_graphs`). Rows join between two launches. One transfer brings what the host
needs of a step: outputs, the rows that are done, and the lengths that grow. The host knows upper limits of all lengths,
by which it chooses the next graph before that.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.application import Application
from penstock.core.named_arrays import chunks_of
from penstock.core.record import Lengths
from penstock.core.spec import Array
from penstock.runtime.generation.generating import GeneratingAhead, GenerationStep, Mask, Rows
from penstock.runtime.generation.generation_graphs import BeginGraph, CapturedGeneration, StepGraph
from penstock.runtime.generation.generation_lanes import BEGINS, STEPS, Mark
from penstock.runtime.generation.generation_places import DONE
from penstock.runtime.generation.generation_state import check_lengths, length_errors
from penstock.runtime.gpu.cuda_graph_executor import device_errors

# B rows of a batch or in progress, P places

# Rows in progress for each row that begins beside a measured step.
ROWS_A_BEGINNING = 16
# One in so many places may be free before rows move into fewer, so that they do not move with each that leaves.
SPARE_PLACES = 4
NO_PLACES: Rows = np.empty(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """Rows in progress.

    Args:
        id_B: Ascending numbers, which are never used again.
        place_B: Their places; moved rows get others.
    """

    id_B: Rows
    place_B: Rows

    @property
    def rows(self) -> int:
        """Their number."""
        return self.id_B.size


@final
@dataclass(kw_only=True, slots=True)
class Begun:
    """Rows that begin.

    Args:
        lengths: Those of the inputs, `[B]`.
        grown: Those of the dimensions that grow, on the host once the mark is reached.
        left_B: Steps that each may take.
        tensors: Their state.
        graph: The graph in whose memory that is; None for memory of its own.
        mark: The end of `begin`.
        joins_B: The rows that join, `[B]`: all, without those that were rejected.
    """

    lengths: dict[str, Lengths]
    grown: dict[str, Tensor]
    left_B: Rows
    tensors: dict[str, Tensor]
    graph: BeginGraph | None
    mark: Mark
    joins_B: Mask


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedStep:
    """A launched step: its rows, their places then, and its results on the host once the mark is reached."""

    id_B: Rows
    place_B: Rows
    results: dict[str, Array]
    mark: Mark


@final
class AheadExecutor(GeneratingAhead):
    """A network whose answers take steps, on a GPU.

    There is one state at a time: where rows join without one, those of the last state end.

    Args:
        application: The network's application, which has `generate`.
        graphs: The network's buffers and graphs.
    """

    def __init__(self, application: Application, graphs: CapturedGeneration) -> None:
        max_rows = graphs.max_rows
        super().__init__(application, max_rows)
        self._lanes, self.graphs, self.fallback = graphs.lanes, graphs, graphs.fallback
        self._layout, self._places = self.graphs.layout, self.graphs.places
        self._outputs = list(application.outputs)
        # Upper limits of the lengths; steps left; whether a row is there; whether the device knows that none is.
        self._bound = {name: np.full(max_rows, self.graphs.example_lengths[name]) for name in self._layout.dims}
        self._left_P = np.zeros(max_rows, np.int64)
        self._used_P, self._over_P = np.zeros(max_rows, np.bool_), np.ones(max_rows, np.bool_)
        self._launches = self._finishes = self._next_id = 0
        self._written: Mark | None = None
        self._unjoined: Begun | None = None

    @torch.inference_mode()
    def begin(self, chunk_B: Array) -> Begun:
        """See `Generating`."""
        lanes, lengths = self._lanes, self.graphs.lengths_of(chunk_B)
        graph = self.graphs.begin_graph(len(chunk_B), lengths)
        with lanes.on(BEGINS):
            if self._written is not None:
                # The last rows are still read where these will be written.
                lanes.follow(BEGINS, self._written)
            tensors = self.graphs.begun(chunk_B) if graph is None else self._replayed(graph, chunk_B)
            begun = Begun(
                lengths=lengths,
                grown={name: self._to_host(tensors[name]) for name in self._layout.growing},
                left_B=self.limits(chunk_B),
                tensors=tensors,
                graph=graph,
                mark=lanes.mark(BEGINS),
                joins_B=np.ones(len(chunk_B), np.bool_),
            )
        if graph is not None:
            self._unjoined = begun
        return begun

    def _replayed(self, graph: BeginGraph, chunk_B: Array) -> dict[str, Tensor]:
        if self._unjoined is not None:
            # All graphs of `begin` share their memory.
            self._unjoined.tensors = {name: tensor.clone() for name, tensor in self._unjoined.tensors.items()}
            self._unjoined.graph = None
            self._unjoined.mark = self._lanes.mark(BEGINS)
        host = self._lanes.host(graph.packing.nbytes)
        feeds = self.graphs.feeds(chunk_B, graph.rows, graph.room)
        for name, array in graph.packing.arrays(host).items():
            array[...] = feeds[name]
        with device_errors():
            graph.inputs.copy_(host, non_blocking=True)
            return graph.run()

    def is_ready(self, begun: Begun) -> bool:
        """See `GeneratingAhead`."""
        return begun.mark.query()

    def rejected(self, begun: Begun) -> tuple[Mask, list[str]]:
        """See `GeneratingAhead`."""
        reasons: list[str] = []
        for bad_B, why in length_errors(self._layout, begun.tensors, self._lengths(begun)):
            begun.joins_B &= ~bad_B
            reasons.append(why)
        return ~begun.joins_B, reasons

    def begin_alone(self, chunk_B: Array) -> None:
        """See `Generating`."""
        self.begin(chunk_B).mark.synchronize()
        self._unjoined = None

    @torch.inference_mode()
    def join(self, states: Sequence[PlacedRows | Begun]) -> PlacedRows:
        """See `Generating`."""
        first, *begun = states
        if isinstance(first, Begun):
            self._end_all()
            first, begun = PlacedRows(id_B=NO_PLACES, place_B=NO_PLACES), states
        # All are checked before any joins.
        checked = [(each, self._checked_lengths(each)) for each in begun if isinstance(each, Begun)]
        for each, lengths in checked:
            first = self._with(first, each, lengths)
        return first

    def _lengths(self, begun: Begun) -> dict[str, Lengths]:
        with device_errors():
            begun.mark.synchronize()
        rows = begun.left_B.size
        return begun.lengths | {name: each.numpy()[:rows] for name, each in begun.grown.items()}

    def _checked_lengths(self, begun: Begun) -> dict[str, Lengths]:
        lengths = {name: each_B[begun.joins_B] for name, each_B in self._lengths(begun).items()}
        check_lengths(self._layout, begun.tensors, lengths)
        return lengths

    def _with(self, state: PlacedRows, begun: Begun, lengths: dict[str, Lengths]) -> PlacedRows:
        rows = int(np.count_nonzero(begun.joins_B))
        place_B = np.flatnonzero(~self._used_P)[:rows]
        assert place_B.size == rows, (state.rows, rows, self.max_rows)
        self._write(begun, place_B)
        self._used_P[place_B], self._over_P[place_B], self._left_P[place_B] = True, False, begun.left_B[begun.joins_B]
        for name, bound_P in self._bound.items():
            bound_P[place_B] = lengths[name]
        id_B = np.arange(self._next_id, self._next_id + rows)
        self._next_id += rows
        return PlacedRows(id_B=np.concatenate([state.id_B, id_B]), place_B=np.concatenate([state.place_B, place_B]))

    def _write(self, begun: Begun, place_B: Rows) -> None:
        graph, rows = begun.graph, begun.left_B.size
        targets = np.zeros((2, rows if graph is None else graph.rows), np.int64)
        # The scratch place, for rows that are padding or rejected.
        targets[0], joins_B = self._places.count, np.flatnonzero(begun.joins_B)
        targets[0, joins_B], targets[1, joins_B] = place_B, begun.left_B[joins_B]
        with self._lanes.on(STEPS), device_errors():
            if graph is None:
                to_B, left_B = self._to_device(targets)
                self._places.write({name: each[:rows] for name, each in begun.tensors.items()}, to_B, left_B)
            else:
                self._to_device(targets, graph.targets)
                graph.write()
            self._written = self._lanes.mark(STEPS)
        if self._unjoined is begun:
            self._unjoined = None

    def _end_all(self) -> None:
        with self._lanes.on(STEPS), device_errors():
            self._places.left.zero_()
            self._lanes.mark(STEPS).synchronize()
        self._let_go(np.flatnonzero(self._used_P))
        self._finishes = self._launches

    @torch.inference_mode()
    def keep(self, state: PlacedRows, keep_B: Mask) -> tuple[PlacedRows, Rows]:
        """See `Generating`."""
        gone_B = state.place_B[~keep_B]
        running_B = gone_B[~self._over_P[gone_B]]
        if running_B.size:
            with self._lanes.on(STEPS), device_errors():
                self._places.stop(self._to_device(running_B))
        self._let_go(gone_B)
        return PlacedRows(id_B=state.id_B[keep_B], place_B=state.place_B[keep_B]), np.flatnonzero(keep_B)

    def _let_go(self, place_B: Rows) -> None:
        self._used_P[place_B], self._over_P[place_B] = False, True
        for name, dim in self._layout.growing.items():
            # Launched steps of a row that the network did not end may still add to its lengths.
            bound_P = self._bound[name]
            bound_P[place_B] = np.minimum(bound_P[place_B] + self._ahead, int(dim))

    @property
    def _ahead(self) -> int:
        """Steps that are launched and not finished."""
        return self._launches - self._finishes

    def step(self, state: PlacedRows) -> GenerationStep:
        """See `Generating`."""
        return self.finish(self.launch(state), state)

    @torch.inference_mode()
    def launch(self, state: PlacedRows) -> LaunchedStep:
        """See `GeneratingAhead`."""
        with self._lanes.on(STEPS), device_errors():
            return self._launched(state, self._arranged(state))

    def _launched(self, state: PlacedRows, graph: StepGraph) -> LaunchedStep:
        host = self._lanes.host(graph.packing.nbytes)
        host.copy_(graph.run(), non_blocking=True)
        self._launches += 1
        return LaunchedStep(
            id_B=state.id_B,
            place_B=state.place_B.copy(),
            results=graph.packing.arrays(host),
            mark=self._lanes.mark(STEPS),
        )

    def _arranged(self, state: PlacedRows) -> StepGraph:
        """Choose the graph of a step; move rows and fill holes that would make it larger."""
        layout, shapes = self._layout, self.graphs.step_shapes
        longest = {name: int(bound_P[state.place_B].max()) for name, bound_P in self._bound.items()}
        # Every launched step may add an entry, and this one too.
        needed = {name: size + (self._ahead + 1) * (name in layout.growing) for name, size in longest.items()}
        room = {name: min(size, int(layout.dims[name])) for name, size in needed.items()}
        enough = shapes.holding(min(state.rows + state.rows // SPARE_PLACES, self.max_rows), room)[0]
        if int(state.place_B.max()) >= enough:
            self._move(state, enough)
        graph = self.graphs.step_graph(shapes.holding(int(state.place_B.max()) + 1, room))
        room = shapes.rooms(graph.shape)
        hole_P = ~self._used_P[: graph.shape[0]]
        if hole_P.any():
            long_P = np.zeros_like(hole_P)
            for name, bound_P in self._bound.items():
                most_P = bound_P[: hole_P.size] + (name in layout.growing)
                long_P |= np.minimum(most_P, int(layout.dims[name])) > room[name]
            self._fill(np.flatnonzero(hole_P & long_P), state.place_B[0])
        return graph

    def _move(self, state: PlacedRows, count: int) -> None:
        """Move the rows behind the first places into holes among these."""
        high_B = np.flatnonzero(state.place_B >= count)
        from_B, to_B = state.place_B[high_B], np.flatnonzero(~self._used_P[:count])[: high_B.size]
        self._places.move(self._to_device(from_B), self._to_device(to_B))
        for each_P in (self._left_P, self._over_P, *self._bound.values()):
            each_P[to_B] = each_P[from_B]
        self._used_P[to_B] = True
        self._let_go(from_B)
        state.place_B[high_B] = to_B

    def _fill(self, hole_B: Rows, valid: int) -> None:
        if not hole_B.size:
            return
        from_B = np.full(hole_B.size, valid)
        self._places.fill_holes(self._to_device(from_B), self._to_device(hole_B))
        for bound_P in self._bound.values():
            bound_P[hole_B] = bound_P[from_B]
        self._let_go(hole_B)

    def finish(self, launched: LaunchedStep, state: PlacedRows) -> GenerationStep:
        """See `GeneratingAhead`."""
        with device_errors():
            # The only host synchronization of a step.
            launched.mark.synchronize()
        self._finishes += 1
        ran = int(np.searchsorted(state.id_B, launched.id_B[-1], "right"))
        # Where each row was then, and where it is now.
        then_B = launched.place_B[np.searchsorted(launched.id_B, state.id_B[:ran])]
        now_B = state.place_B[:ran]
        named = {name: each[then_B] for name, each in launched.results.items()}
        done_B, full_B = named[DONE], np.zeros(ran, np.bool_)
        for name, dim in self._layout.growing.items():
            self._bound[name][now_B] = named[name]
            full_B |= named[name] >= int(dim)
        self._left_P[now_B] -= 1
        self._over_P[now_B] |= done_B | full_B | (self._left_P[now_B] <= 0)
        output_B = chunks_of(self.output, {name: named[name] for name in self._outputs}, {})
        return GenerationStep(state, output_B, done_B, full_B)

    def rehearsal(self, chunk: Array, rows: int) -> Callable[[], object]:
        """See `Generating`: steps in the largest room, with rows that begin and join beside them."""
        chunk_B = np.repeat(np.asarray(chunk).reshape(1, *self.input.shape), rows, 0)
        state, beside_B = self.join([self.begin(chunk_B)]), chunk_B[: max(1, rows // ROWS_A_BEGINNING)]
        largest = self.graphs.step_shapes.holding(rows, {name: int(dim) for name, dim in self._layout.dims.items()})
        graph, scratch = self.graphs.step_graph(largest), np.full(len(beside_B), self._places.count)
        launched: deque[LaunchedStep] = deque()
        begun: deque[Begun] = deque()

        @torch.inference_mode()
        def step() -> None:
            if not begun:
                begun.append(self.begin(beside_B))
            elif self.is_ready(begun[0]):
                self._write(begun.popleft(), scratch)
            with self._lanes.on(STEPS), device_errors():
                launched.append(self._launched(state, graph))
            if len(launched) > 1:
                self.finish(launched.popleft(), state)

        return step

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = self._lanes.host(tensor.nbytes)
        view = host.view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        return view

    def _to_device(self, array: Array, into: Tensor | None = None) -> Tensor:
        host = self._lanes.host(array.nbytes)
        view = host.view(torch.int64).view(array.shape)
        view.numpy()[...] = array
        into = torch.empty(array.shape, dtype=torch.int64, device=self._lanes.device) if into is None else into
        return into.copy_(view, non_blocking=True)
