"""The network that every peer serves: loaded from the same bundle, on one thread."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.peers.gpu_network import GpuNetwork
from benchmarks.peers.servers import CACHE
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor, Mask, Rows, StepInput
from penstock.runtime.executor_choice import make_runnable


@final
class Network:
    """The network of a bundle over raw bytes; `predict` is the same over arrays, `[B, ...]` to `[B, ...]`.

    Args:
        bundle: The bundle's folder.

    Raises:
        BundleError: It is damaged, or its answers are not the recorded ones.
    """

    def __init__(self, bundle: str | Path) -> None:
        # Penstock's own executor, so that the servers are compared and not the networks.
        runnable = make_runnable(Path(bundle), Execution(cache=CACHE, cores=1), lambda _: 64)
        self._executor = runnable.executor
        self._dtype = runnable.application.input.numpy_dtype
        self._shape = runnable.application.input.shape
        self._reply_nbytes = runnable.application.output.nbytes

    def predict(self, chunks: Array) -> Array:
        """One batch, arrays to arrays."""
        rows = len(chunks)
        batch = StepInput(
            slots_B=np.arange(rows), chunk_B=chunks, length_B=np.ones(rows, np.int64), fresh_B=np.ones(rows, np.bool_)
        )
        return self._executor.step(batch).output_B

    def answer(self, bodies: Sequence[bytes | bytearray | memoryview]) -> list[bytes]:
        """One batch: the raw bytes of each input to the raw bytes of each output."""
        # A bytearray, because torch needs writable memory.
        chunks = np.frombuffer(bytearray().join(bodies), self._dtype).reshape(len(bodies), *self._shape)
        outputs = self.predict(chunks).tobytes()
        return [outputs[start : start + self._reply_nbytes] for start in range(0, len(outputs), self._reply_nbytes)]


@final
class StreamNetwork:
    """The network of a live bundle with the state of its streams in slots.

    Args:
        bundle: The bundle's folder.
        slots: Maximum number of streams.

    Raises:
        BundleError: It is damaged, or its answers are not the recorded ones.
    """

    def __init__(self, bundle: str | Path, slots: int) -> None:
        runnable = make_runnable(Path(bundle), Execution(cache=CACHE, cores=1), lambda _: slots)
        assert isinstance(runnable.executor, Executor), runnable.executor
        self._executor = runnable.executor

    def step(self, slots_B: Rows, chunk_B: Array, fresh_B: Mask, last_B: Mask) -> tuple[Array, Rows]:
        """Run one full chunk of each of some streams; return the outputs and their valid lengths."""
        length_B = np.full(len(chunk_B), chunk_B.shape[1])
        batch = StepInput(slots_B=slots_B, chunk_B=chunk_B, length_B=length_B, fresh_B=fresh_B, last_B=last_B)
        result = self._executor.step(batch)
        assert result.length_B is not None, self._executor
        return result.output_B, result.length_B


def load_network(given: argparse.Namespace) -> Network | GpuNetwork:
    """Load the network that a peer's command line names."""
    return Network(given.bundle) if given.device is None else GpuNetwork(given.bundle, given.device)


def peer_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of every peer's server.py, see `Tuning`.

    Args:
        argv: The arguments; this process's by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--max-queue", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1, help="processes that run the network")
    parser.add_argument("--http", type=int, default=1, help="processes or threads that read requests")
    parser.add_argument("--timeout-ms", type=float, default=30_000, help="a request that waited longer is refused")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the network compiled by hand for this device")
    return parser.parse_args(argv)
