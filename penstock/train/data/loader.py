"""Batch loaders that read ahead by threads; the batches do not depend on the number of threads.

Reading releases Python's lock, so that threads suffice, but for decoding in many of them: see `reader_processes`.
"""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.data.collate import Collate
from penstock.train.data.examples import Examples
from penstock.train.data.reader_processes import LEAST_WORKERS, ReaderProcesses
from penstock.train.data.readers import OnBad, Piece, read_piece
from penstock.train.data.sampler import BatchIndices, one_pass
from penstock.train.data.trees import Tree, joined, leaves, mapped
from penstock.train.data.waits import DeviceWaits, HostWaits, Waits

# B examples of a batch

# Workers take pieces of about this size, so that all of them share a batch.
PIECE_BYTES = 1 << 20
LEAST_PIECE, LARGEST_PIECE = 8, 1024
BATCHES_AHEAD = 2


class Batch(NamedTuple):
    """Raw inputs and targets of a step, on the loader's device: tensors, or trees of them."""

    inputs: Tree
    targets: Tree


@final
class ReadingTimes:
    """Examples that the threads of a loader read, and their time. Several threads may `count` at once.

    Attributes:
        threads: Number of threads; 0 if examples are read on demand or not at all.
        examples: Examples that were read.
        wall_s: Seconds that the reading took, added over the threads.
        cpu_s: Seconds of processor time in them; in the rest they waited for storage, or for a core.
    """

    def __init__(self) -> None:
        self.threads, self.examples = 0, 0
        self.wall_s = self.cpu_s = 0.0
        self._lock = Lock()

    @contextmanager
    def count(self, examples: int) -> Generator[None]:
        """Count the time of the context."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        self.add(examples, time.perf_counter() - wall_s, time.thread_time() - cpu_s)

    def add(self, examples: int, wall_s: float, cpu_s: float) -> None:
        """Add examples with their time."""
        with self._lock:
            self.examples += examples
            self.wall_s += wall_s
            self.cpu_s += cpu_s

    @property
    def examples_per_s(self) -> float | None:
        """Examples a second that all threads together can read; None before the first."""
        return self.examples * max(1, self.threads) / self.wall_s if self.wall_s else None


class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """An iterator over batches that records the time of waits and the examples that cannot be read.

    Args:
        order: The examples of each batch.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        notify: Called with a sentence when an example is first found to be damaged.

    Attributes:
        bad: Names of examples that cannot be read, with the number of times each was replaced.
        reading: Times of the threads that read.
    """

    def __init__(
        self, order: Iterator[BatchIndices], on_bad: OnBad = "stop", notify: Callable[[str], object] | None = None
    ) -> None:
        self._waits: Waits = HostWaits()
        self.bad: dict[str, int] = {}
        self.reading = ReadingTimes()
        self._order, self._notify = order, notify
        self._on_bad: OnBad = on_bad

    def __next__(self) -> Batch:
        with self._waits.count():
            return self._next()

    @property
    def waited_s(self) -> float:
        """Seconds that the steps waited for batches; of steps on a GPU, those in which it had nothing else to do."""
        return self._waits.total_s

    @property
    def is_warm(self) -> bool:
        """True if batches are read as fast from now on as they will be later."""
        return True

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _next(self) -> Batch:
        """Return the next batch; raise StopIteration after the last."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers, if there are any."""

    def _count(self, errors: list[BadExample]) -> None:
        for error in errors:
            if error.name not in self.bad and self._notify is not None:
                self._notify(f"{error} It is replaced by another example.")
            self.bad[error.name] = self.bad.get(error.name, 0) + 1


@final
class ReadingLoader(Loader):
    """Batches read by threads, in a given order.

    Args:
        examples: The set.
        order: The examples of each batch.
        workers: Threads that read ahead; 0 reads on demand. Four or more of them hand their pieces to processes, if
            `examples.in_processes`.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        device: The device of the batches. For a GPU they are read into page-locked memory and copied during the step
            before.
        notify: Called with a sentence when an example is first found to be damaged.
        to_max: Pad to the largest lengths, as `Collate`.
    """

    def __init__(
        self,
        examples: Examples,
        order: Iterator[BatchIndices],
        *,
        workers: int = 0,
        on_bad: OnBad = "stop",
        device: torch.device | None = None,
        notify: Callable[[str], object] | None = None,
        to_max: bool = False,
    ) -> None:
        super().__init__(order, on_bad, notify)
        self._examples, self._collate = examples, Collate(examples, to_max=to_max)
        self._device = device or torch.device("cpu")
        self._piece = min(max(PIECE_BYTES // max(1, examples.input_nbytes), LEAST_PIECE), LARGEST_PIECE)
        self._pool = ThreadPoolExecutor(workers, "penstock-read") if workers else None
        self._workers = self.reading.threads = workers
        has_processes = examples.in_processes and workers >= LEAST_WORKERS
        self._processes = ReaderProcesses(examples, workers, self._piece) if has_processes else None
        self._under_way: deque[_UnderWay] = deque()
        self._pieces_under_way = 0
        self._copies = _Copies(self._device) if self._device.type == "cuda" else None
        if self._copies is not None:
            self._waits = DeviceWaits(self._device)

    @property
    def is_warm(self) -> bool:
        """See `Loader`; True once the processes have started, if there will be any."""
        return self._processes is None or self._processes.has_started

    def close(self) -> None:
        """Stop the workers after their current pieces."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
        self._under_way.clear()

    def _next(self) -> Batch:
        if self._copies is None:
            batch, bad = self._read()
        else:
            if self._copies.waiting is None:
                self._copies.start(self._read())
            batch, bad = self._copies.take()
            # The next call waits for a batch that is not ready, and raises its error.
            if self._under_way and all(part.done() and not part.exception() for part in self._under_way[0].parts):
                self._copies.start(self._read())
        self._count(bad)
        self._tell_refusal()
        return batch

    def _tell_refusal(self) -> None:
        if self._processes is not None and self._notify is not None and (why := self._processes.refusal()) is not None:
            self._notify(f"The examples are read by threads alone, which is slower: no process can read them ({why}).")

    def _read(self) -> "_Ready":
        self._read_ahead()
        if not self._under_way:
            raise StopIteration
        batch = self._under_way.popleft()
        parts = [part.result() for part in batch.parts]
        self._pieces_under_way -= len(parts)
        if self._pool is not None:
            self._read_ahead()
        inputs, targets = self._collate.tensors(batch.inputs, joined([part.targets_P for part in parts]))
        bad = [error for part in parts for error in part.bad]
        if self._copies:
            # One array of fixed size was read into page-locked memory.
            inputs = inputs if inputs is batch.inputs else mapped(Tensor.pin_memory, inputs)
            targets = mapped(Tensor.pin_memory, targets)
        return _Ready(Batch(inputs, targets), bad)

    def _read_ahead(self) -> None:
        """Start enough batches to keep every worker busy during a step."""
        wanted = BATCHES_AHEAD if self._workers else 1
        while len(self._under_way) < wanted or self._pieces_under_way < 2 * self._workers:
            places = next(self._order, None)
            if places is None:
                return
            self._begin(places)

    def _begin(self, places: BatchIndices) -> None:
        count = len(places.indices_B)
        inputs: Array | Tensor
        if self._examples.record is None:
            # Torch's cache of page-locked memory reuses none before its copy is done.
            room = torch.from_numpy(self._examples.empty(0))
            inputs = torch.empty((count, *room.shape[1:]), dtype=room.dtype, pin_memory=self._copies is not None)
            inputs_B = inputs.numpy()
        else:
            inputs = inputs_B = self._examples.empty(count)
        submit = self._pool.submit if self._pool else _run
        parts: list[Future[Piece]] = []
        for start in range(0, count, self._piece):
            rows = slice(start, start + self._piece)
            parts.append(submit(self._read_piece, places.of(rows), inputs_B[rows]))
        self._pieces_under_way += len(parts)
        self._under_way.append(_UnderWay(inputs, parts))

    def _read_piece(self, places: BatchIndices, inputs_P: Array) -> Piece:
        began_s = time.perf_counter()
        found = None if self._processes is None else self._processes.read(places, inputs_P, self._on_bad)
        if found is not None:
            self.reading.add(len(places.indices_B), time.perf_counter() - began_s, found.cpu_s)
            return found.piece
        with self.reading.count(len(places.indices_B)):
            return read_piece(self._examples, places, inputs_P, self._on_bad)


class _Ready(NamedTuple):
    batch: Batch
    bad: list[BadExample]


class _UnderWay(NamedTuple):
    inputs: Array | Tensor
    parts: list[Future[Piece]]


def _run(task: Callable[..., Piece], *given: Any) -> Future[Piece]:
    """Run a task in this thread, as an executor without workers."""
    done: Future[Piece] = Future()
    done.set_result(task(*given))
    return done


@final
class _Copies:
    """Copies batches to a GPU on a second stream, one ahead of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.waiting: _Ready | None = None

    def start(self, ready: _Ready) -> None:
        with torch.cuda.stream(self._stream):
            batch = Batch(*(mapped(self._to_device, part) for part in ready.batch))
        self.waiting = _Ready(batch, ready.bad)

    def _to_device(self, part: Tensor) -> Tensor:
        return part.to(self._device, non_blocking=True)

    def take(self) -> _Ready:
        ready, self.waiting = self.waiting, None
        assert ready is not None
        step = torch.cuda.current_stream(self._device)
        step.wait_stream(self._stream)
        for part in leaves(tuple(ready.batch)):
            # Its memory belongs to the copy stream, which must not reuse it before the step is done.
            part.record_stream(step)
        return ready


def first_inputs(examples: Examples, count: int, *, on_bad: OnBad = "stop") -> Array:
    """Read the raw inputs of the first few examples, `[count, ...]`, or of all if there are fewer.

    Args:
        examples: The set.
        count: The number of examples.
        on_bad: As of `ReadingLoader`.
    """
    if examples.record is None:
        return first_batch(examples, count, on_bad=on_bad).inputs.numpy()
    places = next(one_pass(len(examples), min(count, len(examples))))
    return read_piece(examples, places, examples.empty(len(places.indices_B)), on_bad).inputs_P


def first_signals(examples: Examples, count: int, *, on_bad: OnBad = "stop") -> Array:
    """Read the first few inputs of one tensor, `[count, ...]`, padded with zeros where their lengths vary.

    Args:
        examples: The set.
        count: The number of examples.
        on_bad: As of `ReadingLoader`.
    """
    inputs = first_inputs(examples, count, on_bad=on_bad)
    if examples.record is None:
        return inputs
    (signals,) = examples.record.batch(inputs).values()
    return signals


def first_batch(examples: Examples, count: int, *, on_bad: OnBad = "stop") -> Batch:
    """Read the first few examples; arguments as of `first_inputs`."""
    return next(ReadingLoader(examples, one_pass(len(examples), min(count, len(examples))), on_bad=on_bad))
