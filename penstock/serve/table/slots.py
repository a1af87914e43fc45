"""The slot table: the only path of requests and results between front-ends and an engine.

A struct of arrays over N slots and K ring entries in one buffer. Each column has one writer, so it needs no lock.
Counters are written last: they publish what was written before them (x86-64 keeps stores in order).

A slot is *ready* when (`submitted != consumed` or `busy`) and `produced - taken < K`. It is free again when
`submitted == consumed`, `produced == taken` and not `busy`. Every step of a row gives exactly one result, with
`output_length` 0 where there is no output yet; a `busy` row takes another step without a new chunk.

The ring entry of the current chunk stays unchanged until the row is no longer busy: a front-end has at most K entries
ahead, the current one included.

Each of F front-ends owns N / F consecutive slots, and a ring in which the engine lists those that have results.
"""

import mmap
import os
import platform
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ServeError
from penstock.core.spec import Array, TensorSpec

# N slots, K chunks in a slot's ring, F front-ends

# status
OK, EXPIRED, FAILED, NOT_FINITE = 0, 1, 2, 3
ENGINE_LOST = 4  # never in the table: set by a front-end when the engine has died
ONE_ENGINE_LOST = 5  # the same, where other engines serve the model

# flags
FIRST = 1  # the first chunk of a stream
LAST = 2  # the last chunk of a stream
SOFT_DEADLINE = 4  # runs even when late: a live stream catches up, and never loses a chunk
LOW_PRIORITY = 8  # runs where it makes no row of normal priority late

# Columns of `counts`.
OFFERED, ANSWERED, REFUSED, TOO_LATE, BROKEN, INVALID = range(6)
# Live streams: open now, opened, refused, aborted; their chunks and results.
STREAMS_OPEN, STREAMS, STREAMS_REFUSED, STREAMS_ABORTED, CHUNKS, RESULTS = range(6, 12)

CANCELLED_NS = -(1 << 61)  # the deadline of a cancelled row, which expires even with SOFT_DEADLINE

# Upper edges of the time histograms, four to an octave from 50 us to 13 s; one more bin for longer times.
TIME_EDGES_NS: npt.NDArray[np.int64] = (50_000 * 2 ** (np.arange(73) / 4)).astype(np.int64)
# Upper edges of the batch-size histogram; one more bin for larger batches.
BATCH_EDGES: npt.NDArray[np.int64] = 2 ** np.arange(14, dtype=np.int64)
MAX_COSTS = 16

LINE, PAGE = 64, 4096

Writer = Literal["front-end", "engine"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table and its only writer."""

    name: str
    writer: Writer
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayout:
    """The shape of a table, from which both sides compute the offsets of its columns.

    Args:
        slots: N, a multiple of F.
        chunks: K, 1 for one-shot requests.
        input: One raw input chunk.
        output: One output chunk.
        frontends: F.
    """

    slots: int
    chunks: int
    input: TensorSpec
    output: TensorSpec
    frontends: int = 1

    def __post_init__(self) -> None:
        assert self.slots % self.frontends == 0, (self.slots, self.frontends)

    @property
    def slots_each(self) -> int:
        """Slots of one front-end."""
        return self.slots // self.frontends

    def columns(self) -> tuple[Column, ...]:
        """Every column, in the order of the buffer."""
        n, k, f = self.slots, self.chunks, self.frontends
        times, batches = len(TIME_EDGES_NS) + 1, len(BATCH_EDGES) + 1
        return (
            Column("submitted", "front-end", "int64", (n,)),  # chunks put into the input ring
            Column("taken", "front-end", "int64", (n,)),  # results taken out
            Column("consumed", "engine", "int64", (n,)),  # chunks taken in
            Column("produced", "engine", "int64", (n,)),  # results put out
            Column("busy", "engine", "int64", (n,)),  # 1: the state wants another step without new input
            Column("generation", "front-end", "int64", (n,)),  # the stream that owns the slot
            Column("input", "front-end", self.input.dtype, (n, k, *self.input.shape)),
            Column("length", "front-end", "int64", (n, k)),  # valid part of the chunk
            Column("deadline_ns", "front-end", "int64", (n, k)),  # the deadline of its result
            Column("arrival_ns", "front-end", "int64", (n, k)),  # arrival of the request
            Column("flags", "front-end", "int64", (n, k)),
            Column("output", "engine", self.output.dtype, (n, k, *self.output.shape)),
            Column("output_length", "engine", "int64", (n, k)),
            Column("status", "engine", "int64", (n, k)),
            # Written only where traces are exported.
            Column("queue_ns", "engine", "int64", (n, k)),  # from arrival to the start of its batch
            Column("batch_rows", "engine", "int64", (n, k)),  # rows of its batch; 0 where it did not run
            # Slots in the order of their results, so that front-ends need not scan. At most K results of a slot are
            # outstanding, so that a ring of K entries per slot never overruns its reader.
            Column("done", "engine", "int64", (f, self.slots_each * k)),
            Column("done_count", "engine", "int64", (f,)),
            # Statistics of the front-ends; a row has one writer.
            Column("held", "front-end", "int64", (f, 8)),  # slots in use, by priority: normal, low
            Column("counts", "front-end", "int64", (f, 16)),  # see OFFERED and following
            # Header: inputs of admission control.
            Column("cost_rows", "engine", "int64", (MAX_COSTS,)),  # measured batch sizes, 0 where unused
            Column("cost_ns", "engine", "int64", (MAX_COSTS,)),
            Column("handling_ns", "engine", "int64", (1,)),  # time of one row besides the network
            Column("min_compute_ns", "engine", "int64", (1,)),  # the shortest time of the network for one row
            Column("other_tables_ns", "engine", "int64", (1,)),  # predicted work of the device's other tables
            # Their share of the recent device time, in thousandths.
            Column("other_tables_share", "engine", "int64", (1,)),
            # Statistics, cumulative.
            Column("batch_counts", "engine", "int64", (batches,)),
            Column("queue_counts", "engine", "int64", (times,)),
            Column("compute_counts", "engine", "int64", (times,)),
            Column("latency_counts", "engine", "int64", (times,)),
            Column("sums", "engine", "int64", (4,)),  # rows, queue ns, compute ns, latency ns
            Column("outcomes", "engine", "int64", (5,)),  # by status; the last: answered late
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        columns = self.columns()
        return _offsets(columns)[-1] + _nbytes(columns[-1])


@final
class SlotTable:
    """The columns as NumPy arrays over one buffer.

    Args:
        layout: How many slots of which chunks.
        buffer: Zeroed memory of `layout.nbytes` bytes; shared memory where front-ends are processes of their own.
    """

    submitted: npt.NDArray[np.int64]
    taken: npt.NDArray[np.int64]
    consumed: npt.NDArray[np.int64]
    produced: npt.NDArray[np.int64]
    busy: npt.NDArray[np.int64]
    generation: npt.NDArray[np.int64]
    input: Array
    length: npt.NDArray[np.int64]
    deadline_ns: npt.NDArray[np.int64]
    arrival_ns: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]
    output: Array
    output_length: npt.NDArray[np.int64]
    status: npt.NDArray[np.int64]
    queue_ns: npt.NDArray[np.int64]
    batch_rows: npt.NDArray[np.int64]
    done: npt.NDArray[np.int64]
    done_count: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    cost_rows: npt.NDArray[np.int64]
    cost_ns: npt.NDArray[np.int64]
    handling_ns: npt.NDArray[np.int64]
    min_compute_ns: npt.NDArray[np.int64]
    other_tables_ns: npt.NDArray[np.int64]
    other_tables_share: npt.NDArray[np.int64]
    batch_counts: npt.NDArray[np.int64]
    queue_counts: npt.NDArray[np.int64]
    compute_counts: npt.NDArray[np.int64]
    latency_counts: npt.NDArray[np.int64]
    sums: npt.NDArray[np.int64]
    outcomes: npt.NDArray[np.int64]

    def __init__(self, layout: TableLayout, buffer: Any) -> None:
        self.layout = layout
        self.slots = layout.slots
        self.chunks = layout.chunks
        columns = layout.columns()
        for column, offset in zip(columns, _offsets(columns), strict=True):
            count = int(np.prod(column.shape))
            array = np.frombuffer(buffer, column.dtype, count, offset).reshape(column.shape)
            setattr(self, column.name, array)

    @classmethod
    def private(cls, layout: TableLayout) -> Self:
        """Make a table in private memory.

        Raises:
            ServeError: The processor does not keep stores in order.
        """
        _check_processor()
        return cls(layout, mmap.mmap(-1, layout.nbytes))

    @classmethod
    def shared(cls, layout: TableLayout) -> tuple[Self, int]:
        """Make a table in a memfd; returns its descriptor too.

        The memory is freed with the last process that maps it.

        Raises:
            ServeError: The processor does not keep stores in order.
        """
        _check_processor()
        descriptor = os.memfd_create("penstock-slots", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, layout.nbytes)
        return cls.attached(layout, descriptor), descriptor

    @classmethod
    def attached(cls, layout: TableLayout, descriptor: int) -> Self:
        """Map a table that another process made."""
        assert os.fstat(descriptor).st_size == layout.nbytes, (os.fstat(descriptor).st_size, layout)
        return cls(layout, mmap.mmap(descriptor, layout.nbytes))


def _check_processor() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ServeError(
            f"the slot table needs a processor that keeps stores in order, x86-64; this is {platform.machine()}."
        )


def _nbytes(column: Column) -> int:
    return int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize


def _offsets(columns: tuple[Column, ...]) -> list[int]:
    offsets: list[int] = []
    offset = 0
    for column in columns:
        # Whole cache lines: columns of different writers must not share one. Whole pages for the columns that a GPU
        # maps: a page can be locked only once.
        offset = _aligned(offset, PAGE if column.name in ("input", "output") else LINE)
        offsets.append(offset)
        offset += _nbytes(column)
        if column.name in ("input", "output"):
            offset = _aligned(offset, PAGE)
    return offsets


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
