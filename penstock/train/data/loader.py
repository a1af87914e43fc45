"""Batch loaders that read ahead by threads; the batches do not depend on the number of threads.

Decoding and reading release Python's lock, so that threads suffice and no data is sent between processes.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.readers import OnBad
from penstock.train.data.sampler import BatchIndices, another, one_pass

# B examples of a batch, P examples of a piece

# Workers take pieces of about this size, so that all of them share a batch.
PIECE_BYTES = 1 << 20
LEAST_PIECE, LARGEST_PIECE = 8, 1024
BATCHES_AHEAD = 2
# With half of the examples damaged, 64 bad draws in a row happen once in 10**19.
ATTEMPTS = 64


class Batch(NamedTuple):
    """Raw inputs and targets of a step, on the loader's device."""

    inputs: Tensor
    targets: Tensor


class Loader(ABC):
    """An iterator over batches that records the time of waits and the examples that cannot be read.

    Args:
        notify: Called with a sentence when an example is first found to be damaged.
    """

    def __init__(self, notify: Callable[[str], object] | None = None) -> None:
        self.waited_s = 0.0
        """Seconds of waiting for batches."""
        self.bad: dict[str, int] = {}
        """Names of examples that cannot be read, with the number of times each was replaced."""
        self._notify = notify

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return self._next()
        finally:
            self.waited_s += time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _next(self) -> Batch:
        """Return the next batch; raise StopIteration after the last."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""

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
        workers: Threads that read ahead; 0 reads on demand.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        device: The device of the batches. For a GPU they are read into page-locked memory and copied during the step
            before.
        notify: Called with a sentence when an example is first found to be damaged.
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
    ) -> None:
        super().__init__(notify)
        self._examples, self._order = examples, order
        self._on_bad: OnBad = on_bad
        self._device = device or torch.device("cpu")
        self._piece = min(max(PIECE_BYTES // max(1, examples.input_nbytes), LEAST_PIECE), LARGEST_PIECE)
        self._pool = ThreadPoolExecutor(workers, "penstock-read") if workers else None
        self._workers = workers
        self._under_way: deque[_UnderWay] = deque()
        self._pieces_under_way = 0
        self._copies = _Copies(self._device) if self._device.type == "cuda" else None

    def close(self) -> None:
        """Stop the workers after their current pieces."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
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
        return batch

    def _read(self) -> "_Ready":
        self._read_ahead()
        if not self._under_way:
            raise StopIteration
        batch = self._under_way.popleft()
        parts = [part.result() for part in batch.parts]
        self._pieces_under_way -= len(parts)
        if self._pool is not None:
            self._read_ahead()
        targets = torch.from_numpy(np.concatenate([part.targets for part in parts]))
        bad = [error for part in parts for error in part.bad]
        return _Ready(Batch(batch.inputs, targets.pin_memory() if self._copies else targets), bad)

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
        # Torch's cache of page-locked memory reuses none before its copy is done.
        room = torch.from_numpy(self._examples.empty(0))
        inputs = torch.empty((count, *room.shape[1:]), dtype=room.dtype, pin_memory=self._copies is not None)
        inputs_B = inputs.numpy()
        submit = self._pool.submit if self._pool else _run
        parts: list[Future[_Part]] = []
        for start in range(0, count, self._piece):
            rows = slice(start, start + self._piece)
            parts.append(submit(_read_piece, self._examples, places.of(rows), inputs_B[rows], self._on_bad))
        self._pieces_under_way += len(parts)
        self._under_way.append(_UnderWay(inputs, parts))


class _Ready(NamedTuple):
    batch: Batch
    bad: list[BadExample]


class _Part(NamedTuple):
    targets: Array
    bad: list[BadExample]


class _UnderWay(NamedTuple):
    inputs: Tensor
    parts: list[Future[_Part]]


def _run(task: Callable[..., _Part], *given: Any) -> Future[_Part]:
    """Run a task in this thread, as an executor without workers."""
    done: Future[_Part] = Future()
    done.set_result(task(*given))
    return done


def _read_piece(examples: Examples, places: BatchIndices, inputs_P: Array, on_bad: OnBad) -> _Part:
    try:
        return _Part(examples.read(places.indices_B, places.seeds_B, inputs_P), [])
    except BadExample:
        if on_bad == "stop":
            raise
    # One by one, so that a bad example does not read the others again.
    targets: list[Array] = []
    bad: list[BadExample] = []
    for row in range(len(inputs_P)):
        place = places.of(slice(row, row + 1))
        index_1, attempts_1 = place.indices_B, np.zeros(1, np.int64)
        while len(targets) == row:
            try:
                targets.append(examples.read(index_1, place.seeds_B, inputs_P[row : row + 1]))
            except BadExample as error:
                index_1, _ = replaced(index_1, place, error, attempts_1, len(examples))
                bad.append(error)
    return _Part(np.concatenate(targets), bad)


def replaced(
    indices_B: Array, places: BatchIndices, error: BadExample, attempts_B: Array, examples: int
) -> tuple[Array, int]:
    """Replace the indices of an example that cannot be read, as a function of the places alone.

    Args:
        indices_B: The indices to read.
        places: The places of the batch.
        error: The error of one example.
        attempts_B: The number of replacements of each place; updated.
        examples: The number of examples.

    Returns:
        The new indices, and the number of replacements.

    Raises:
        TrainError: A place was replaced too often.
    """
    indices_B = indices_B.copy()
    rows = np.flatnonzero(indices_B == error.index)
    if not len(rows):
        raise TrainError(f"a BadExample names example {error.index}, which was not requested: {error}") from error
    for row in rows:
        if attempts_B[row] == ATTEMPTS:
            raise TrainError(f"{ATTEMPTS} examples in a row cannot be read, the last one: {error}")
        indices_B[row] = another(places.seeds_B[row], int(attempts_B[row]), examples)
        attempts_B[row] += 1
    return indices_B, len(rows)


@final
class _Copies:
    """Copies batches to a GPU on a second stream, one ahead of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.waiting: _Ready | None = None

    def start(self, ready: _Ready) -> None:
        with torch.cuda.stream(self._stream):
            batch = Batch(*(part.to(self._device, non_blocking=True) for part in ready.batch))
        self.waiting = _Ready(batch, ready.bad)

    def take(self) -> _Ready:
        ready, self.waiting = self.waiting, None
        assert ready is not None
        step = torch.cuda.current_stream(self._device)
        step.wait_stream(self._stream)
        for part in ready.batch:
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
    order = one_pass(len(examples), min(count, len(examples)))
    return next(ReadingLoader(examples, order, on_bad=on_bad)).inputs.numpy()
