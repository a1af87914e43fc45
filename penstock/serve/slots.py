"""The slot table: everything that front-ends and the engine say to each other, and nothing else.

A struct of arrays over N slots and K ring entries in one buffer. Each column has one writer, so there is nothing to
lock. Counters are written last: they publish what was written before them (x86-64 keeps stores in order).

A slot is *ready* when (`submitted != consumed` or `busy`) and `produced - taken < K`. It is free again when
`submitted == consumed`, `produced == taken` and not `busy`. Every step of a row gives exactly one result, with
`output_length` 0 where it has nothing to say yet; a `busy` row takes another step without a new chunk.

The ring entry of the chunk that is being worked on stays as it is until the row is no longer busy: a front-end has at
most K entries ahead, the one in progress included.

Each of F front-ends owns N / F slots in a row, and a ring in which the engine names those of them that have results.
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
ENGINE_LOST = 4  # never in the table: what a front-end says for an engine that is gone
ONE_ENGINE_LOST = 5  # as well, where other engines go on

# flags
FIRST = 1  # the first chunk of a stream
LAST = 2  # the last chunk of a stream
PATIENT = 4  # still worth answering after its deadline: a live stream catches up, it never loses a chunk
BACKGROUND = 8  # of the second class: runs where it delays nobody of the first

# What a front-end counts, by column of `counts`.
OFFERED, ANSWERED, REFUSED, TOO_LATE, BROKEN, INVALID = range(6)
# And of live streams: open now, opened, refused, ended before their end, their chunks, and what came of those.
STREAMS_OPEN, STREAMS, STREAMS_REFUSED, STREAMS_BROKEN, CHUNKS, RESULTS = range(6, 12)

CANCELLED_NS = -(1 << 61)  # a deadline so far in the past that no patience covers it

# Upper edges of the time histograms, four to an octave from 50 us to 13 s; one more bin holds what is longer.
TIME_EDGES_NS: npt.NDArray[np.int64] = (50_000 * 2 ** (np.arange(73) / 4)).astype(np.int64)
# Upper edges of the batch-size histogram; one more bin holds what is larger.
BATCH_EDGES: npt.NDArray[np.int64] = 2 ** np.arange(14, dtype=np.int64)
MAX_COSTS = 16

LINE, PAGE = 64, 4096

Writer = Literal["front-end", "engine"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table and who alone writes it."""

    name: str
    writer: Writer
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayout:
    """How many slots of which chunks: what both sides need to find the columns in the buffer.

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
            Column("generation", "front-end", "int64", (n,)),  # which stream owns the slot
            Column("input", "front-end", self.input.dtype, (n, k, *self.input.shape)),
            Column("length", "front-end", "int64", (n, k)),  # how much of the chunk is valid
            Column("deadline_ns", "front-end", "int64", (n, k)),  # when it must be answered
            Column("arrival_ns", "front-end", "int64", (n, k)),  # when it came
            Column("flags", "front-end", "int64", (n, k)),
            Column("output", "engine", self.output.dtype, (n, k, *self.output.shape)),
            Column("output_length", "engine", "int64", (n, k)),
            Column("status", "engine", "int64", (n, k)),
            # Of each result, written only where traces are wanted.
            Column("queue_ns", "engine", "int64", (n, k)),  # from arrival to the start of its batch
            Column("batch_rows", "engine", "int64", (n, k)),  # rows of its batch; 0 where it did not run
            # The slots of results as they are put out, so that front-ends need not scan. At most K a slot are
            # outstanding, so a ring of K entries a slot never overruns its reader.
            Column("done", "engine", "int64", (f, self.slots_each * k)),
            Column("done_count", "engine", "int64", (f,)),
            # What each front-end tells the others and the world; a row has one writer.
            Column("held", "front-end", "int64", (f, 8)),  # slots in use, of the first and of the second class
            Column("counts", "front-end", "int64", (f, 16)),  # requests by what became of them
            # Header: what front-ends admit from.
            Column("cost_rows", "engine", "int64", (MAX_COSTS,)),  # measured batch sizes, 0 where unused
            Column("cost_ns", "engine", "int64", (MAX_COSTS,)),
            Column("handling_ns", "engine", "int64", (1,)),  # of one row besides the network
            Column("least_ns", "engine", "int64", (1,)),  # the shortest time that the network took for one row
            Column("rivals_ns", "engine", "int64", (1,)),  # the work that waits in the engine's other tables
            Column("rivals_share", "engine", "int64", (1,)),  # of the engine's time lately, in thousandths
            # Statistics, cumulative.
            Column("batch_counts", "engine", "int64", (batches,)),
            Column("queue_counts", "engine", "int64", (times,)),
            Column("compute_counts", "engine", "int64", (times,)),
            Column("latency_counts", "engine", "int64", (times,)),
            Column("sums", "engine", "int64", (4,)),  # rows, queue ns, compute ns, latency ns
            Column("outcomes", "engine", "int64", (5,)),  # by status, then answered but late
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        columns = self.columns()
        return _placed(columns)[-1] + _nbytes(columns[-1])


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
    least_ns: npt.NDArray[np.int64]
    rivals_ns: npt.NDArray[np.int64]
    rivals_share: npt.NDArray[np.int64]
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
        for column, offset in zip(columns, _placed(columns), strict=True):
            count = int(np.prod(column.shape))
            array = np.frombuffer(buffer, column.dtype, count, offset).reshape(column.shape)
            setattr(self, column.name, array)

    @classmethod
    def private(cls, layout: TableLayout) -> Self:
        """A table in this process's own memory.

        Raises:
            ServeError: A processor that does not keep stores in order.
        """
        _refuse_other_processors()
        return cls(layout, mmap.mmap(-1, layout.nbytes))

    @classmethod
    def shared(cls, layout: TableLayout) -> tuple[Self, int]:
        """A table in memory that dies with the last process that holds it, and its file descriptor.

        Raises:
            ServeError: A processor that does not keep stores in order.
        """
        _refuse_other_processors()
        descriptor = os.memfd_create("penstock-slots", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, layout.nbytes)
        return cls.attached(layout, descriptor), descriptor

    @classmethod
    def attached(cls, layout: TableLayout, descriptor: int) -> Self:
        """The table that another process made."""
        assert os.fstat(descriptor).st_size == layout.nbytes, (os.fstat(descriptor).st_size, layout)
        return cls(layout, mmap.mmap(descriptor, layout.nbytes))


def _refuse_other_processors() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ServeError(
            f"the slot table needs a processor that keeps stores in order, x86-64; this is {platform.machine()}."
        )


def _nbytes(column: Column) -> int:
    return int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize


def _placed(columns: tuple[Column, ...]) -> list[int]:
    """Where each column begins."""
    places: list[int] = []
    offset = 0
    for column in columns:
        # Whole cache lines, so that columns of different writers never share one; and whole pages for those that a GPU
        # reaches, since a page can be locked only once.
        offset = _aligned(offset, PAGE if column.name in ("input", "output") else LINE)
        places.append(offset)
        offset += _nbytes(column)
        if column.name in ("input", "output"):
            offset = _aligned(offset, PAGE)
    return places


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
