"""CUDA graphs of answers that take steps: `step` by places and room, `begin` by rows and lengths.

All are captured at start, from the largest down, within limits of time and memory, so that none is captured between two
steps. A batch whose shape has no graph runs in the smallest graph that is larger. A `begin` too large for every graph
runs without one. Steps and beginnings run at the same time, so each have their own stream and memory pool.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.named_arrays import SHORTEST_ROOM
from penstock.core.record import Lengths, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.state_layout import StateLayout
from penstock.core.wording.counted import counted
from penstock.runtime.generation.generating_network import GeneratingNetwork
from penstock.runtime.generation.generation_lanes import BEGINS, STEPS, Lanes
from penstock.runtime.generation.generation_places import DONE, Packing, Places
from penstock.runtime.generation.generation_state import check_lengths
from penstock.runtime.gpu.graph_cache import GraphCache, GraphShapes, Shape, size_of, smallest_holding
from penstock.runtime.gpu.precision import computing

# B rows of a batch, P places

log = logging.getLogger(__name__)

Made = TypeVar("Made")

# Smaller rooms save little time, and each costs graphs.
LEAST_ROOM = 32
# Time for the graphs of steps, and for those of beginnings.
CAPTURE_S = 15.0


class NotCapturable(Exception):
    """The network's step cannot be captured in a CUDA graph; the message says why."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """A captured step.

    Args:
        shape: Its places, and the room of each dimension.
        packing: Its results: the outputs, `done`, and the lengths that grow.
        run: Runs it; returns the results as bytes, on the device.
    """

    shape: Shape
    packing: Packing
    run: Callable[[], Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BeginGraph:
    """A captured `begin`.

    Args:
        rows: B.
        room: Of each dimension of the inputs.
        packing: Its inputs.
        inputs: Their bytes, on the device.
        run: Makes the state of the rows.
        targets: `[2, B]`, on the device: places and steps left.
        write: Writes the state to the places.
    """

    rows: int
    room: dict[str, int]
    packing: Packing
    inputs: Tensor
    run: Callable[[], dict[str, Tensor]]
    targets: Tensor
    write: Callable[[], None]


@final
class CapturedGeneration:
    """The network's buffers and graphs.

    Args:
        module: The network, in evaluation mode, on the device.
        application: Its application, which has `generate`.
        lanes: The device.
        example: One raw input chunk, from which the buffers are made.
        max_rows: P.
        precision: As in `GpuWay`.
        limit_bytes: Memory of the graphs.
        padding: What room for floats is filled with; tests poison it.

    Attributes:
        lanes: The device.
        max_rows: P.
        places: The buffers.
        example_lengths: The lengths that the places have at first.
        fallback: Which rows begin without a graph, why, and what to do; empty where none does.

    Raises:
        ApplicationError: The network does not have the functions or the inputs that are declared.
        NotCapturable: Its step cannot be captured.
    """

    def __init__(
        self,
        module: nn.Module,
        application: Application,
        *,
        lanes: Lanes,
        example: Array,
        max_rows: int,
        precision: str = "fp32",
        limit_bytes: int = 1 << 62,
        padding: float = 0.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        assert application.generate is not None, application.name
        self.max_rows = max_rows
        self.lanes, self._clock_s, self._input = lanes, clock_s, application.input
        self.layout = layout = StateLayout(application.generate, application.input, padding)
        self._network = GeneratingNetwork(module, application, layout)
        self._computing = partial(computing, precision, lanes.device.type)
        self._outputs = {spec.name: (getattr(torch, spec.dtype), spec.shape) for spec in application.outputs.values()}
        dims = application.input.dims if isinstance(application.input, RecordSpec) else {}
        self._input_dims = list(dims)
        self.step_shapes = GraphShapes(layout.dims.values(), max_rows, LEAST_ROOM, fine=True)
        self.begin_shapes = GraphShapes(dims.values(), max_rows, LEAST_ROOM)
        self._name = application.name
        with torch.inference_mode():
            with lanes.on(STEPS):
                chunk_B = np.asarray(example).reshape(1, *application.input.shape)
                like = self.begun(chunk_B)
                grown = {name: like[name].cpu().numpy() for name in layout.growing}
                lengths = self.lengths_of(chunk_B) | grown
                check_lengths(layout, like, lengths)
                try:
                    self.places = Places(layout, like, max_rows)
                except torch.cuda.OutOfMemoryError as error:
                    raise NotCapturable(
                        f"the memory does not suffice for {max_rows} rows of its state; lower --max-batch"
                    ) from error
            self.example_lengths = {name: int(each[0]) for name, each in lengths.items()}
            self._begins: dict[Shape, BeginGraph] = {}
            # Graphs by the shape that a step needs.
            self._chosen: dict[Shape, StepGraph] = {}
            self._steps = self._captured(self.step_shapes, self._step_graph, limit_bytes // 2)
            if not self._steps:
                raise NotCapturable("its largest step needs more memory than graphs may have; raise --graph-memory")
            try:
                # Without the largest graphs, smaller ones still hold most batches.
                self._begins = self._captured(self.begin_shapes, self._begin_graph, limit_bytes // 2, partly=True)
            except NotCapturable as error:
                self.fallback = f"{self._name} begins without CUDA graphs, because it cannot be captured ({error})."
            else:
                self.fallback = self._begins_without_graphs()
            if self.fallback:
                log.warning("%s", self.fallback)

    def describe(self) -> str:
        """The numbers of graphs, for the log."""
        buffers = f"the state takes {self.places.nbytes >> 20:,} MB"
        return f"{len(self._steps)} CUDA graphs of steps, {len(self._begins)} of beginnings; {buffers}"

    def step_graph(self, needed: Shape) -> StepGraph:
        """Return the smallest graph of a step that holds a shape."""
        found = self._chosen.get(needed)
        if found is None:
            shape = smallest_holding(self._steps, needed)
            assert shape is not None, needed
            found = self._chosen[needed] = self._steps[shape]
        return found

    def begin_graph(self, rows: int, lengths: Mapping[str, Lengths]) -> BeginGraph | None:
        """Return the smallest graph that begins so many rows of these lengths; None where there is none."""
        shape = smallest_holding(self._begins, self.begin_shapes.holding(rows, _longest(lengths)))
        return None if shape is None else self._begins[shape]

    def lengths_of(self, chunk_B: Array) -> dict[str, Lengths]:
        """Return the lengths of the inputs, `[B]` by name."""
        return self._input.lengths(chunk_B) if isinstance(self._input, RecordSpec) else {}

    def begun(self, chunk_B: Array) -> dict[str, Tensor]:
        """Begin rows without a graph, in the lane of the caller; returns their state, with all lengths."""
        lengths = self.lengths_of(chunk_B)
        room = {name: min(max(SHORTEST_ROOM, int(each.max())), int(self._dim(name))) for name, each in lengths.items()}
        arrays = self.feeds(chunk_B, len(chunk_B), room)
        given = {name: torch.from_numpy(each).to(self.lanes.device) for name, each in arrays.items()}
        return self._begin(given, len(chunk_B))

    def feeds(self, chunk_B: Array, rows: int, room: Mapping[str, int]) -> dict[str, Array]:
        """Return inputs and lengths by name, padded to a room, and to so many rows by the last one."""
        if isinstance(self._input, RecordSpec):
            arrays = self._input.batch(chunk_B, room) | self._input.lengths(chunk_B)
        else:
            arrays = {self._input.name: chunk_B}
        index_B = np.minimum(np.arange(rows), len(chunk_B) - 1)
        return {name: array[index_B] for name, array in arrays.items()} if rows > len(chunk_B) else arrays

    def _dim(self, name: str) -> int:
        assert isinstance(self._input, RecordSpec)
        return int(self._input.dims[name])

    def _begin(self, given: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        with self._computing():
            tensors = self._network.begin({name: given[name] for name in self._network.arguments}, rows)
        return tensors | {name: given[name] for name in self._input_dims}

    def _begins_without_graphs(self) -> str:
        every = self.begin_shapes.all()
        without = [shape for shape in every if smallest_holding(self._begins, shape) is None]
        if not without:
            return ""
        rows, *rooms = min(without, key=size_of)
        of_length = "".join(f", {name} {room:,}" for name, room in zip(self._input_dims, rooms, strict=True))
        return (
            f"{self._name}: `begin` of {len(without)} of {len(every)} batch shapes, from {counted(rows, 'row')}"
            f"{of_length} on, runs without CUDA graphs, which did not fit into their memory or were not captured "
            f"within {CAPTURE_S:g} s; raise --graph-memory."
        )

    def _captured(
        self,
        shapes: GraphShapes,
        make: Callable[[Shape, GraphCache[Made]], Made | None],
        limit_bytes: int,
        *,
        partly: bool = False,
    ) -> dict[Shape, Made]:
        cache: GraphCache[Made] = GraphCache(limit_bytes)
        made: dict[Shape, Made] = {}
        end_s, every = self._clock_s() + CAPTURE_S, shapes.all()
        for shape in every:
            if self._clock_s() > end_s:
                log.info("%s: %d of %d CUDA graphs captured within %g s", self._name, len(made), len(every), CAPTURE_S)
                break
            try:
                graph = make(shape, cache)
            except torch.cuda.OutOfMemoryError:
                graph = None
            except Exception as error:
                # The network is the application's code, which may raise anything where it meets a graph.
                raise NotCapturable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
            if graph is not None:
                made[shape] = graph
            elif not made and not partly:
                # Smaller graphs alone would not hold all rows.
                break
        return made

    def _step_graph(self, shape: Shape, cache: GraphCache[StepGraph]) -> StepGraph | None:
        rows, room, device = shape[0], self.step_shapes.rooms(shape), self.lanes.device
        sections = {name: (dtype, (rows, *sizes)) for name, (dtype, sizes) in self._outputs.items()}
        grown = dict.fromkeys(self.layout.growing, (torch.int64, (rows,)))
        packing = Packing(sections | {DONE: (torch.bool, (rows,))} | grown)

        def run() -> Tensor:
            with self._computing():
                named = self.places.step(self._network, rows, room)
            packed = torch.empty(packing.nbytes, dtype=torch.uint8, device=device)
            for name, view in packing.views(packed).items():
                view.copy_(named[name])
            return packed

        peak_bytes = self.lanes.rehearse(STEPS, run)
        if not cache.fits(packing.nbytes, peak_bytes):
            return None
        made = StepGraph(shape=shape, packing=packing, run=self.lanes.captured(STEPS, run))
        cache.put(shape, made, packing.nbytes, peak_bytes)
        return made

    def _begin_graph(self, shape: Shape, cache: GraphCache[BeginGraph]) -> BeginGraph | None:
        rows, room, lanes = shape[0], self.begin_shapes.rooms(shape), self.lanes
        example = {spec.name: self._least(spec, rows, room) for spec in self._input.tensors}
        example |= {name: np.full(rows, size) for name, size in room.items()}
        names = {*self._network.arguments, *self._input_dims}
        arrays = {name: torch.from_numpy(array) for name, array in example.items() if name in names}
        packing = Packing({name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()})
        # Streams do not wait for what others write, so each buffer is filled in the lane that reads it.
        with lanes.on(BEGINS):
            inputs = torch.zeros(packing.nbytes, dtype=torch.uint8, device=lanes.device)
            for name, view in packing.views(inputs).items():
                view.copy_(arrays[name])
        run = partial(self._begin, packing.views(inputs), rows)
        peak_bytes = lanes.rehearse(BEGINS, run)
        if not cache.fits(packing.nbytes, peak_bytes):
            return None
        again = lanes.captured(BEGINS, run)
        with lanes.on(BEGINS):
            tensors = again()
            lanes.mark(BEGINS).synchronize()
        with lanes.on(STEPS):
            targets = torch.zeros(2, rows, dtype=torch.int64, device=lanes.device)
            targets[0] = self.places.count
        write = partial(self.places.write, tensors, targets[0], targets[1])
        lanes.rehearse(STEPS, write)
        made = BeginGraph(
            rows=rows,
            room=room,
            packing=packing,
            inputs=inputs,
            run=again,
            targets=targets,
            write=lanes.captured(STEPS, write),
        )
        # What a graph gives stays until the rows join, beside what the others give.
        given_bytes = sum(tensor.nbytes for tensor in tensors.values())
        cache.put(shape, made, packing.nbytes + given_bytes, peak_bytes)
        return made

    def _least(self, spec: TensorSpec, rows: int, room: Mapping[str, int]) -> Array:
        sizes = [room.get(getattr(size, "name", ""), int(size)) for size in spec.shape]
        # Zero may be beyond the limits of the numbers.
        least = 0 if spec.limits is None else min(max(0, spec.limits[0]), spec.limits[1])
        return np.full((rows, *sizes), least, spec.numpy_dtype)


def _longest(lengths: Mapping[str, Lengths]) -> dict[str, int]:
    return {name: int(each.max(initial=1)) for name, each in lengths.items()}
