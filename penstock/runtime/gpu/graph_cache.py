"""CUDA graphs by the shape of their batch: which shapes there are, and which graphs are kept. No torch.

A shape is the number of rows and the room of each dimension that varies. Rows and rooms are rounded up to a few sizes.
All graphs share one memory pool: a graph's intermediate results lie where those of the others were. So the pool is as
large as the largest graph needs, and it shrinks only when no graph is left.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Generic, TypeVar, final

from penstock.core.dim import Dim
from penstock.core.named_arrays import SHORTEST_ROOM

Graph = TypeVar("Graph")
# Rows, then the room of each dimension.
Shape = tuple[int, ...]

# Rooms of one dimension: powers of two, and the largest length.
MAX_ROOMS = 8
# Memory of a graph besides its tensors: nodes and their arguments.
GRAPH_BYTES = 4 << 20
# While serving, a shape is captured when it is used for this time, at most one shape in this many seconds.
USES = 3
CAPTURE_EVERY_S = 1.0


def fine_row_sizes(most: int) -> list[int]:
    """Powers of two, and from 64 on quarters of them: sizes for graphs that replay one after the other for long."""
    sizes = {*row_sizes(most), *(power * part // 4 for power in _powers(most) if power >= 64 for part in (5, 6, 7))}
    return sorted(size for size in sizes if size <= most)


def row_sizes(most: int) -> list[int]:
    """Powers of two, and from 64 on the midpoints between them, to limit padding."""
    powers = _powers(most)
    midpoints = [power * 3 // 2 for power in powers if power >= 64]
    return [*sorted(size for size in (*powers, *midpoints) if size < most), most]


def room_sizes(dim: Dim, least: int = SHORTEST_ROOM) -> list[int]:
    """Rooms of a dimension, ascending: the edges of its length buckets.

    Args:
        dim: The dimension.
        least: The smallest room, where the dimension is not smaller.
    """
    powers = [1 << power for power in range(int(dim).bit_length()) if dim.min <= 1 << power < dim]
    rooms = [max(room, min(least, int(dim))) for room in (*powers[-(MAX_ROOMS - 1) :], int(dim))]
    return [*dict.fromkeys(rooms)]


@final
class GraphShapes:
    """The shapes of an input's batches.

    Args:
        dims: The dimensions that vary.
        max_rows: The largest batch.
        least_room: The smallest room of a dimension.
        fine: More sizes of rows and rooms, from 64 on, for less padding.
    """

    def __init__(
        self, dims: Iterable[Dim], max_rows: int, least_room: int = SHORTEST_ROOM, *, fine: bool = False
    ) -> None:
        self.rows = fine_row_sizes(max_rows) if fine else row_sizes(max_rows)
        self._rooms = {dim.name: room_sizes(dim, least_room) for dim in dims}
        if fine:
            for name, rooms in self._rooms.items():
                between = [room * 3 // 2 for room in rooms if room >= 64]
                self._rooms[name] = sorted({*rooms, *(room for room in between if room < rooms[-1])})

    def holding(self, rows: int, lengths: Mapping[str, int]) -> Shape:
        """Return the smallest shape for a batch with these longest lengths."""
        return (
            _next(self.rows, rows),
            *(_next(rooms, lengths[name]) for name, rooms in self._rooms.items()),
        )

    def rooms(self, shape: Shape) -> dict[str, int]:
        """Return a shape's room of each dimension."""
        return dict(zip(self._rooms, shape[1:], strict=True))

    def all(self) -> list[Shape]:
        """List every shape, from the largest down."""
        return sorted(product(self.rows, *self._rooms.values()), key=size_of, reverse=True)

    def columns(self) -> list[list[Shape]]:
        """List the shapes to capture at start: for each length, from the longest down, all numbers of rows."""
        levels = max([1, *map(len, self._rooms.values())])
        rooms = [tuple(each[max(len(each) - 1 - level, 0)] for each in self._rooms.values()) for level in range(levels)]
        return [[(rows, *room) for rows in self.rows] for room in dict.fromkeys(rooms)]


@final
class GraphCache(Generic[Graph]):
    """Graphs within a limit of memory; the least recently used are dropped.

    Args:
        limit_bytes: The limit.

    Attributes:
        pool_bytes: Size of the shared pool.
        dropped: Number of graphs that were dropped for others.
        uses: How often each shape was needed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._graphs: OrderedDict[Shape, tuple[Graph, int]] = OrderedDict()
        self.uses: Counter[Shape] = Counter()
        # Of shapes without a graph.
        self._unmet: Counter[Shape] = Counter()
        self._without: set[Shape] = set()
        self._last_capture_s = -CAPTURE_EVERY_S
        self.pool_bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Memory of all graphs."""
        return self.pool_bytes + sum(own for _, own in self._graphs.values())

    @property
    def graphs(self) -> dict[Shape, Graph]:
        """The graph of each shape that has one; from any thread."""
        # One operation of the interpreter, because another thread may use graphs.
        return {shape: graph for shape, (graph, _) in self._graphs.copy().items()}

    def get(self, shape: Shape) -> Graph | None:
        """Return the graph of a shape, if there is one, as the most recently used."""
        found = self._graphs.get(shape)
        if found is None:
            return None
        self._graphs.move_to_end(shape)
        return found[0]

    def due(self, shape: Shape, now_s: float) -> bool:
        """Count a use of a shape without a graph; return whether to capture it now."""
        if shape in self._without:
            return False
        self._unmet[shape] += 1
        if self._unmet[shape] < USES or now_s - self._last_capture_s < CAPTURE_EVERY_S:
            return False
        self._last_capture_s = now_s
        self._unmet[shape] = 0
        return True

    def give_up(self, shape: Shape) -> None:
        """Never again capture a shape while serving: it does not fit, or the network fails on its example."""
        self._without.add(shape)

    def fits(self, own_bytes: int, peak_bytes: int) -> bool:
        """Return whether a graph fits beside the others.

        Args:
            own_bytes: Its inputs and outputs.
            peak_bytes: The most that its intermediate results take.
        """
        own = sum(each for _, each in self._graphs.values()) + own_bytes + GRAPH_BYTES
        return own + max(self.pool_bytes, peak_bytes) <= self._limit_bytes

    def make_room(self, own_bytes: int, peak_bytes: int) -> list[Graph] | None:
        """Drop the least recently used graphs until another one fits.

        Returns:
            The graphs that were dropped; None where it would not fit without all others, and none was dropped.
        """
        if own_bytes + GRAPH_BYTES + peak_bytes > self._limit_bytes:
            return None
        gone: list[Graph] = []
        while not self.fits(own_bytes, peak_bytes):
            gone.append(self._graphs.popitem(last=False)[1][0])
            if not self._graphs:
                self.pool_bytes = 0
        self.dropped += len(gone)
        return gone

    def put(self, shape: Shape, graph: Graph, own_bytes: int, peak_bytes: int) -> None:
        """Keep the graph of a shape."""
        self._graphs[shape] = (graph, own_bytes + GRAPH_BYTES)
        self.pool_bytes = max(self.pool_bytes, peak_bytes)

    def replace(self, shape: Shape, graph: Graph, peak_bytes: int) -> None:
        """Keep another graph of a shape that has one, with the same inputs and outputs."""
        self._graphs[shape] = (graph, self._graphs[shape][1])
        self.pool_bytes = max(self.pool_bytes, peak_bytes)

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self.pool_bytes = 0


def size_of(shape: Shape) -> int:
    """Elements of a shape: the order in which graphs are captured, from the largest down."""
    return prod(shape)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def smallest_holding(shapes: Iterable[Shape], needed: Shape) -> Shape | None:
    """Return the smallest of some shapes that holds another one; None where none does."""
    return min((shape for shape in shapes if _holds(shape, needed)), key=size_of, default=None)


def fastest_holding(ms: Mapping[Shape, float]) -> dict[Shape, Shape]:
    """Find for each shape the one whose graph takes the shortest time, of itself and of those that hold it.

    Args:
        ms: Time of the graph of each shape; infinite where it is not known.
    """
    ordered = sorted(ms, key=lambda shape: (ms[shape], size_of(shape)))
    return {needed: next(shape for shape in ordered if _holds(shape, needed)) for needed in ms}


def _holds(shape: Shape, needed: Shape) -> bool:
    return all(size >= least for size, least in zip(shape, needed, strict=True))


def _next(sizes: list[int], size: int) -> int:
    return next(each for each in sizes if each >= size)
