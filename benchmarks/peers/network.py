"""The network that every peer serves: loaded from the same bundle, on one thread, from raw bytes to raw bytes."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.peers.contestants import CACHE
from penstock.core.spec import Array
from penstock.runtime.executor import Batch
from penstock.runtime.serving import Execution, make_runnable


@final
class Network:
    """The network of a bundle over raw bytes; `predict` is the same over arrays, `[B, ...]` to `[B, ...]`.

    Args:
        bundle: The bundle's folder.

    Raises:
        BundleError: It is damaged, or its answers are not the recorded ones.
    """

    def __init__(self, bundle: str | Path) -> None:
        # By what runs it in Penstock too, so that the servers are compared and not what they serve.
        runnable = make_runnable(
            Path(bundle), app=None, accept_changed=False, how=Execution(cache=CACHE, cores=1), slots=lambda _: 64
        )
        self._executor = runnable.executor
        self._dtype = runnable.application.input.numpy_dtype
        self._shape = runnable.application.input.shape
        self._reply_nbytes = runnable.application.output.nbytes

    def predict(self, chunks: Array) -> Array:
        """One batch, arrays to arrays."""
        rows = len(chunks)
        batch = Batch(
            slots_B=np.arange(rows), chunk_B=chunks, length_B=np.ones(rows, np.int64), fresh_B=np.ones(rows, np.bool_)
        )
        return self._executor.step(batch).output_B

    def answer(self, bodies: Sequence[bytes | bytearray | memoryview]) -> list[bytes]:
        """One batch: the raw bytes of each input to the raw bytes of each output."""
        # A bytearray, because torch wants memory that can be written.
        chunks = np.frombuffer(bytearray().join(bodies), self._dtype).reshape(len(bodies), *self._shape)
        outputs = self.predict(chunks).tobytes()
        return [outputs[start : start + self._reply_nbytes] for start in range(0, len(outputs), self._reply_nbytes)]


def peer_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line that every peer's server.py understands: see `Tuned`.

    Args:
        argv: The arguments; this process's by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--max-queue", type=int, default=1024)
    return parser.parse_args(argv)
