"""Processes that read pieces of batches into shared memory, for decoding that Python's lock holds back in threads.

Each reading thread of a loader hands its pieces to a process and waits. The processes start while the threads already
read, so that a short pass never waits for one, and does not start any.
"""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Empty, LifoQueue
from socket import socketpair
from threading import Lock, Thread
from typing import Any, NamedTuple, final

import numpy as np

from penstock.core.errors import BadExample, PenstockError, TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.readers import OnBad, Piece, read_piece
from penstock.train.data.sampler import BatchIndices

# P examples of a piece

# Fewer threads hardly wait for Python's lock.
LEAST_WORKERS = 4
# A pass that is over sooner is read by threads.
START_S = 1.0
# A process that does not end by itself is killed.
END_S = 5.0
SHARED_MEMORY = Path("/dev/shm")


class ReadPiece(NamedTuple):
    """A piece that a process read.

    Args:
        piece: The piece.
        cpu_s: The processor time it took, in seconds.
    """

    piece: Piece
    cpu_s: float


@final
class ReaderProcesses:
    """As many processes as a loader has threads; each serves one thread at a time.

    Args:
        examples: The set. It is pickled: each process has a copy.
        workers: Number of processes.
        most: The most examples of a piece.
    """

    def __init__(self, examples: Examples, workers: int, most: int) -> None:
        self._examples, self._workers, self._most = examples, workers, most
        self._created_s = time.monotonic()
        self._ready: LifoQueue[_ReaderProcess] = LifoQueue()
        self._lock = Lock()
        self._starting: Thread | None = None
        self._started: list[_ReaderProcess] = []
        self._closed = False
        self._refusal: str | None = None

    def read(self, places: BatchIndices, inputs_P: Array, on_bad: OnBad) -> ReadPiece | None:
        """Read some examples in an idle process; return None if none has started yet.

        Raises:
            BadExample: An example cannot be read, and `on_bad` is `"stop"`.
            TrainError: The process ended, or its error.
        """
        try:
            process = self._ready.get_nowait()
        except Empty:
            self._start_in_time()
            return None
        found = process.read(places, inputs_P, on_bad)
        # After an error, the loader closes all of them.
        self._ready.put(process)
        return found

    @property
    def has_started(self) -> bool:
        """True if all processes are ready, or none will be."""
        return self._starting is not None and not self._starting.is_alive()

    def refusal(self) -> str | None:
        """Return once why no process can read the examples, as a phrase; None before, and if there is no reason."""
        with self._lock:
            why, self._refusal = self._refusal, None
        return why

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            starting = self._starting
        for process in self._started:
            process.end()
        if starting is not None:
            starting.join()
        for process in self._started:
            process.wait()

    def _start_in_time(self) -> None:
        if self._starting is not None or time.monotonic() - self._created_s < START_S:
            return
        with self._lock:
            if self._starting is None and not self._closed:
                self._starting = Thread(target=self._start, name="penstock-start-readers", daemon=True)
                self._starting.start()

    def _start(self) -> None:
        try:
            content = ForkingPickler.dumps(self._examples)
            for _ in range(self._workers):
                with self._lock:
                    if self._closed:
                        return
                    self._started.append(_ReaderProcess(self._examples, self._most))
            for process in self._started:
                process.give(content)
            for process in self._started:
                process.wait_until_ready()
                self._ready.put(process)
        except Exception as error:  # noqa: BLE001 - pickling runs the user's code, and raises anything
            for process in self._started:
                process.end()
            with self._lock:
                if not self._closed:
                    self._refusal = " ".join(str(error).split())[:300] or type(error).__name__


@final
class _ReaderProcess:
    """A process with memory for one piece, and a socket to it."""

    def __init__(self, examples: Examples, most: int) -> None:
        self._like = examples.empty(0)
        with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
            size = max(1, most * self._like.dtype.itemsize * int(np.prod(self._like.shape[1:])))
            # Room on disk or in memory is taken now: a full one is an error here, not a SIGBUS later.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
            ours, theirs = socketpair()
            with theirs:
                handles = (theirs.fileno(), file.fileno())
                command = [sys.executable, "-m", "penstock.train.data.reader_processes", *map(str, handles)]
                # A Ctrl-C of the terminal is for the training, which ends its readers.
                self._process = subprocess.Popen(
                    command, pass_fds=handles, env=_environment(), stdin=subprocess.DEVNULL, start_new_session=True
                )
        self._socket = Connection(ours.detach())

    def give(self, content: memoryview) -> None:
        """Send the examples."""
        self._socket.send_bytes(content)

    def wait_until_ready(self) -> None:
        """Wait until the process has the examples; raise a TrainError if it cannot have them."""
        if (why := self._answer()) is not None:
            raise TrainError(why)

    def read(self, places: BatchIndices, inputs_P: Array, on_bad: OnBad) -> ReadPiece:
        """See `ReaderProcesses.read`."""
        self._send((places, on_bad))
        kind, *found = self._answer()
        if kind == "bad":
            raise _bad(*found)
        if kind == "error":
            raise TrainError(*found)
        targets_P, indices_P, bad, cpu_s = found
        inputs_P[...] = np.ndarray(inputs_P.shape, self._like.dtype, self._memory)
        return ReadPiece(Piece(inputs_P, targets_P, indices_P, [_bad(*each) for each in bad]), cpu_s)

    def end(self) -> None:
        """Let the process end after its piece."""
        with suppress(OSError):
            self._socket.close()

    def wait(self) -> None:
        """Wait for the end, which is forced after some seconds."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Any) -> None:
        try:
            self._socket.send(message)
        except OSError:
            raise self._lost() from None

    def _answer(self) -> Any:
        try:
            return self._socket.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> TrainError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.returncode
        return TrainError(
            f"a process that reads examples ended with status {status}; look for its error above, or for a lack of "
            f"memory (Loading(workers=...) with fewer takes less), and resume."
        )


def _bad(sentence: str, index: int, name: str) -> BadExample:
    return BadExample(sentence, index=index, name=name)


def _environment() -> dict[str, str]:
    """Return the environment of a process: the same modules can be imported, no GPU is seen, one thread computes."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _serve(socket: Connection, memory: mmap.mmap) -> None:
    """Read pieces until the training's end of the socket is closed."""
    try:
        examples = socket.recv()
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - importing the user's modules raises anything
        socket.send(f"{type(error).__name__}: {error}")
        return
    socket.send(None)
    like = examples.empty(0)
    while True:
        try:
            places, on_bad = socket.recv()
        except EOFError:
            return
        inputs_P = np.ndarray((len(places.indices_B), *like.shape[1:]), like.dtype, memory)
        if examples.record is not None:
            inputs_P[...] = np.zeros((), like.dtype)
        began_s = time.process_time()
        socket.send(_answer(examples, places, inputs_P, on_bad, began_s))


def _answer(examples: Examples, places: BatchIndices, inputs_P: Array, on_bad: OnBad, began_s: float) -> Any:
    try:
        piece = read_piece(examples, places, inputs_P, on_bad)
    except BadExample as error:
        return "bad", str(error), error.index, error.name
    except Exception as error:  # noqa: BLE001 - it is raised again in the training
        return "error", str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    bad = [(str(error), error.index, error.name) for error in piece.bad]
    return "piece", piece.targets_P, piece.indices_P, bad, time.process_time() - began_s


def _main() -> None:
    handle, file = map(int, sys.argv[1:])
    try:
        _serve(Connection(handle), mmap.mmap(file, 0))
    except (BrokenPipeError, ConnectionResetError):
        # The training ended.
        return


if __name__ == "__main__":
    _main()
