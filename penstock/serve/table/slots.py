"""The slot table: the only path of requests and results between front-ends and an engine.

A struct of arrays over N slots and K ring entries in one buffer. Each column has one writer, so it needs no lock.
Counters are written last: they publish what was written before them (x86-64 keeps stores in order, and the compiled
front-end writes and reads them by calls).

A slot is *ready* when (`submitted != consumed` or `busy`) and `produced - taken < K`. The engine rests while none is.
The front-end wakes it after each store that may make one ready: of `submitted`, of a cancelled deadline, and of `taken`
where the ring of results was full. A slot is free again when `submitted == consumed`, `produced == taken` and not
`busy`. Every step of a row gives exactly one result, with `output_length` 0 where there is no output yet; a `busy` row
takes another step without a new chunk.

The ring entry of the current chunk stays unchanged until the row is no longer busy: a front-end has at most K entries
ahead, the current one included.

An answer that takes steps has more results than chunks: its slot has a ring of R results, as many as there can be, so
that a row never waits for a client that does not read.

The next process of a front-end drops the results of the one before it, cancels its rows, and frees no slot before every
result published is listed in the ring: an entry to come would be read as one of the slot's next stream.
`tests/model/slot_protocol.py` states these rules as single stores, and is explored in every interleaving.

Each of F front-ends owns N / F consecutive slots, and a ring in which the engine lists those that have results.
"""

import json
import math
import mmap
import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, final, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from penstock.core.application import Application
from penstock.core.errors import ServeError
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array
from penstock.serve.table.lengths import MAX_LENGTHS, LengthGrid

# N slots, K chunks and R results in a slot's rings, F front-ends, L length buckets, 1 where the size is fixed, S words
# of a state

# status
OK, EXPIRED, FAILED, NOT_FINITE = 0, 1, 2, 3
ENGINE_LOST = 4  # never in the table: set by a front-end when the engine has died
ONE_ENGINE_LOST = 5  # the same, where other engines serve the model
CUT = 6  # a good result, the last of an answer that was ended at its maximum of steps
LOST_TWICE = 7  # never in the table: the row was being run by two engines when they died
LOST_OFTEN = 8  # never in the table: engines died one after the other while they ran the stream

# flags
FIRST = 1  # the first chunk of a stream
LAST = 2  # the last chunk of a stream
SOFT_DEADLINE = 4  # runs even when late: a live stream catches up, and never loses a chunk
LOW_PRIORITY = 8  # runs where it makes no row of normal priority late
SAVES = 32  # the state after the chunk is wanted, see `state`
RESTORES = 64  # the chunk goes on from the state in `restored`; of a stream that begins in the place of FIRST
RESETS = 16  # the network gives what it holds back, and the state is clear after the chunk; the stream goes on

# Columns of `counts`.
OFFERED, ANSWERED, REFUSED, TOO_LATE, BROKEN, INVALID = range(6)
# Live streams: open now, opened, refused, aborted; their chunks and results.
STREAMS_OPEN, STREAMS, STREAMS_REFUSED, STREAMS_ABORTED, CHUNKS, RESULTS = range(6, 12)
RETRIED = 12  # rows that were submitted to another engine after theirs had died
# Live streams that went on after their engine had died, and their chunks that ran once more. Those that did not: they
# were longer than what is kept, there was no memory to keep them, no engine took them in time, or engines died one
# after the other while they ran them.
RESUMED, REPLAYED, LOST_OUTGROWN, LOST_NO_MEMORY, LOST_NO_ENGINE, LOST_REPEATED = range(13, 19)
# Ends of utterances: decoded again by the beam; greedy since its time was over, there were too many, or it failed.
BEAM_DECODED, BEAM_LATE, BEAM_REFUSED, BEAM_FAILED = range(19, 23)
BEAM_RESTARTS = 23  # times that the process of the beam was started again
COUNTS = 24

CANCELLED_NS = -(1 << 61)  # the deadline of a cancelled row, which expires even with SOFT_DEADLINE

# Upper edges of the time histograms, four to an octave from 50 us to 13 s; one more bin for longer times.
TIME_EDGES_NS: npt.NDArray[np.int64] = (50_000 * 2 ** (np.arange(73) / 4)).astype(np.int64)
# Upper edges of the batch-size histogram; one more bin for larger batches.
BATCH_EDGES: npt.NDArray[np.int64] = 2 ** np.arange(14, dtype=np.int64)
MAX_COSTS = 16

LINE, PAGE = 64, 4096
# Bytes of the description of how a network runs.
RUNNING = 4096

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table."""

    name: str
    dtype: np.dtype[Any]
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
        results: R; by default K.
        state_bytes: Bytes of a stream's state that can be read and restored; 0 where none can.
    """

    slots: int
    chunks: int
    input: ChunkSpec
    output: ChunkSpec
    frontends: int = 1
    results: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", self.results or self.chunks)
        assert self.slots % self.frontends == 0, (self.slots, self.frontends)

    @classmethod
    def of(cls, application: Application, *, slots: int, frontends: int, state_bytes: int = 0) -> Self:
        """The layout of an application's table."""
        specs = {"input": application.input, "output": application.output}
        results = results_of(application)
        return cls(
            slots=slots,
            chunks=application.chunks,
            frontends=frontends,
            results=results,
            state_bytes=state_bytes,
            **specs,
        )

    @property
    def slots_each(self) -> int:
        """Slots of one front-end."""
        return self.slots // self.frontends

    @property
    def lengths(self) -> int:
        """Length buckets; 1 where the input is of fixed size."""
        grid = LengthGrid.of(self.input)
        return 1 if grid is None else len(grid.edges)

    def columns(self) -> tuple[Column, ...]:
        """Every column, in the order of the buffer."""
        sizes = {
            "N": self.slots,
            "K": self.chunks,
            "F": self.frontends,
            "R": self.results,
            "N / F * R": self.slots_each * self.results,
            "L": self.lengths,
            "S": -(-self.state_bytes // 8),
            "times": len(TIME_EDGES_NS) + 1,
            "batches": len(BATCH_EDGES) + 1,
        }
        specs = {"input": self.input, "output": self.output}
        columns: list[Column] = []
        for name, hint in column_hints().items():
            _, _writer, *shape = get_args(hint)
            spec = specs.get(name)
            dtype, chunk = (np.dtype("int64"), ()) if spec is None else (spec.numpy_dtype, spec.shape)
            shape = (sizes[size] if isinstance(size, str) else size for size in shape)
            columns.append(Column(name, dtype, (*shape, *chunk)))
        return tuple(columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return _offsets(self.columns())[-1]


@cache
def column_hints() -> dict[str, Any]:
    """Return the annotations of the columns, which take a millisecond to compute."""
    return get_type_hints(SlotTable, include_extras=True)


@final
class SlotTable:
    """The columns as NumPy arrays over one buffer.

    Args:
        layout: Number of slots, and the specs of their chunks.
        buffer: Zeroed memory of `layout.nbytes` bytes; shared memory where front-ends are processes of their own.
    """

    # Each column's only writer and its shape; input and output have the shape of a chunk behind it.
    submitted: Annotated[Ints, "front-end", "N"]  # chunks put into the input ring
    taken: Annotated[Ints, "front-end", "N"]  # results taken out
    consumed: Annotated[Ints, "engine", "N"]  # chunks taken in
    produced: Annotated[Ints, "engine", "N"]  # results put out
    busy: Annotated[Ints, "engine", "N"]  # 1: the row is ready for another step without new input
    generation: Annotated[Ints, "front-end", "N"]  # the stream that owns the slot
    begun: Annotated[Ints, "engine", "N"]  # the stream whose chunk was run last, written before it runs
    input: Annotated[Array, "front-end", "N", "K"]
    length: Annotated[Ints, "front-end", "N", "K"]  # valid part of the chunk; of records, see `LengthGrid`
    deadline_ns: Annotated[Ints, "front-end", "N", "K"]  # the deadline of its result
    arrival_ns: Annotated[Ints, "front-end", "N", "K"]  # arrival of the request
    flags: Annotated[Ints, "front-end", "N", "K"]
    output: Annotated[Array, "engine", "N", "R"]
    output_length: Annotated[Ints, "engine", "N", "R"]
    status: Annotated[Ints, "engine", "N", "R"]
    # Of answers that take steps, `queue_ns` is written only where traces are exported, and `compute_ns` never.
    queue_ns: Annotated[Ints, "engine", "N", "R"]  # from arrival to the start of its batch
    compute_ns: Annotated[Ints, "engine", "N", "R"]  # time of its batch
    # States of live streams, for tickets; the memory of slots that have none is never touched. A state is as it was
    # after the chunk whose number, as `submitted` counts, is in `saved`, which is written last. It may come later than
    # the chunk's result, or not at all; a front-end asks for one of a slot at a time.
    state: Annotated[Ints, "engine", "N", "S"]
    saved: Annotated[Ints, "engine", "N"]
    restored: Annotated[Ints, "front-end", "N", "S"]  # read before the chunk with RESTORES runs
    # Written only where traces are exported.
    batch_rows: Annotated[Ints, "engine", "N", "R"]  # rows of its batch; 0 where it did not run
    # Slots in the order of their results, so that front-ends need not scan. At most R results of a slot are
    # outstanding, so that a ring of R entries per slot never overruns its reader.
    done: Annotated[Ints, "engine", "F", "N / F * R"]
    done_count: Annotated[Ints, "engine", "F"]
    # Statistics of the front-ends; a row has one writer.
    held: Annotated[Ints, "front-end", "F", 8]  # slots in use, by priority: normal, low
    # By length bucket: slots of normal and of low priority, and the sums of their lengths.
    held_lengths: Annotated[Ints, "front-end", "F", 4, MAX_LENGTHS]
    counts: Annotated[Ints, "front-end", "F", COUNTS]  # see OFFERED and following
    # Header: inputs of admission control.
    cost_rows: Annotated[Ints, "engine", "L", MAX_COSTS]  # measured batch sizes, 0 where unused
    cost_ns: Annotated[Ints, "engine", "L", MAX_COSTS]
    cost_largest: Annotated[Ints, "engine", "L"]  # largest batch of each length
    cost_padded: Annotated[Ints, "engine", 1]  # 1: a batch is padded to the edge of its length bucket
    handling_ns: Annotated[Ints, "engine", 1]  # time of one row besides the network
    min_compute_ns: Annotated[Ints, "engine", "L"]  # the shortest time of the network for one row
    other_tables_ns: Annotated[Ints, "engine", 1]  # predicted work of the device's other tables
    other_tables_share: Annotated[Ints, "engine", 1]  # their share of the recent device time, in thousandths
    # Of answers that take steps: measured rows of a step, and the mean steps of an answer, in thousandths.
    step_rows: Annotated[Ints, "engine", MAX_COSTS]
    step_ns: Annotated[Ints, "engine", MAX_COSTS]
    mean_steps: Annotated[Ints, "engine", 1]
    in_progress: Annotated[Ints, "engine", 1]  # rows
    # Statistics, cumulative.
    batch_counts: Annotated[Ints, "engine", "batches"]
    queue_counts: Annotated[Ints, "engine", "times"]
    compute_counts: Annotated[Ints, "engine", "times"]
    latency_counts: Annotated[Ints, "engine", "times"]
    sums: Annotated[Ints, "engine", 4]  # rows, queue ns, compute ns, latency ns
    outcomes: Annotated[Ints, "engine", 5]  # by status; the last: answered late
    running: Annotated[Ints, "engine", RUNNING // 8]  # how the network runs, as JSON, see `describe`
    uncaptured: Annotated[Ints, "engine", 1]  # batches without a CUDA graph though others have one
    # Of answers that take steps: from arrival to the first output, and from each output to the next.
    first_counts: Annotated[Ints, "engine", "times"]
    step_counts: Annotated[Ints, "engine", "times"]
    generated: Annotated[Ints, "engine", 3]  # outputs, first ns, step ns

    def __init__(self, layout: TableLayout, buffer: Any) -> None:
        self.layout = layout
        self.slots = layout.slots
        self.chunks = layout.chunks
        self.results = layout.results
        columns = layout.columns()
        for column, offset in zip(columns, _offsets(columns), strict=False):
            count = math.prod(column.shape)
            array = np.frombuffer(buffer, column.dtype, count, offset).reshape(column.shape)
            setattr(self, column.name, array)

    def describe(self, runs_by: str, fallback: str) -> None:
        """Publish how the network runs.

        Args:
            runs_by: The library and the precision.
            fallback: Why a faster way was not taken; empty if none was refused.
        """
        # Cut so that the escapes of JSON, of at most six characters each, fit too.
        parts = [text[: RUNNING // 12 - 8] for text in (runs_by, fallback)]
        text = json.dumps(parts).encode()
        self.running.view(np.uint8)[:] = np.frombuffer(text.ljust(RUNNING, b" "), np.uint8)

    @property
    def in_use(self) -> int:
        """Number of slots that all front-ends hold."""
        return int(self.held[:, :2].sum())

    @property
    def described(self) -> tuple[str, str]:
        """Read what `describe` published; empty where nothing was."""
        try:
            runs_by, fallback = json.loads(self.running.tobytes())
        except ValueError:
            # Nothing yet, or another process writes it now.
            return "", ""
        return runs_by, fallback

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


def results_of(application: Application) -> int:
    """Entries of a slot's ring of results: all outputs of an answer that takes steps."""
    return application.chunks if application.generate is None else application.generate.max_steps


def _check_processor() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ServeError(
            f"the slot table needs a processor that keeps stores in order, x86-64; this is {platform.machine()}."
        )


def _offsets(columns: tuple[Column, ...]) -> list[int]:
    """The offset of each column, and the end of the last one."""
    offsets: list[int] = []
    offset = 0
    for column in columns:
        # Whole cache lines: columns of different writers must not share one. Whole pages for the columns that a GPU
        # maps: a page can be locked only once.
        unit = PAGE if column.name in ("input", "output") else LINE
        offset = _aligned(offset, unit)
        offsets.append(offset)
        offset += math.prod(column.shape) * np.dtype(column.dtype).itemsize
        if unit == PAGE:
            offset = _aligned(offset, unit)
    return [*offsets, offset]


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
