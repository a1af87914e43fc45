"""A split network as one executor: this process is rank 0, and the others run each batch along."""

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from penstock.core.errors import ServeError
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.split.split_group import Lost, SplitGroup
from penstock.runtime.torch_threads import use_threads

log = logging.getLogger(__name__)

# The number of rows of a batch, as it is sent to the others.
COUNT_BYTES = 8
# A helper that is closed ends itself.
END_S = 5.0
LOADED, FAILED = "loaded", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class HelperJob:
    """Work of a helper process.

    Args:
        bundle: The bundle's folder.
        app: Reference of the application, if it moved.
        accept_changed: Whether an application whose sources changed is accepted.
        device: Its device.
        rank: Its rank.
        size: The number of processes.
        precision: Precision of the network.
        threads: CPU threads; 0 for torch's own choice.
        meeting: The file in which the processes find each other.
        rows: Rows of the memory with the inputs.
    """

    bundle: str
    app: str | None
    accept_changed: bool
    device: str
    rank: int
    size: int
    precision: str
    threads: int
    meeting: str
    rows: int


@final
class Helper:
    """One other process of a split network.

    Args:
        job: What it runs.
        inputs: Descriptor of the memory with the inputs.
        lost: Called, in a thread, if it ends before it is closed.
    """

    def __init__(self, job: HelperJob, inputs: int, lost: Lost) -> None:
        self._job = job
        self._lost = lost
        self._closed = False
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = json.dumps([asdict(job), theirs.fileno(), inputs])
        try:
            # Its standard input ends with this process, and it with that.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.runtime.split.helper_process", given],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(), inputs),
                process_group=0,
            )
        finally:
            theirs.close()

    def wait_loaded(self) -> None:
        """Wait until it has its weights, then watch over it.

        Raises:
            ServeError: It cannot load them.
        """
        said = json.loads(self._ours.recv(1 << 16) or "null")
        if said is None:
            status = self._process.wait()
            raise ServeError(f"the process of {self._job.device} ended with status {status}; its log says why.")
        kind, text = said
        if kind == FAILED:
            raise ServeError(text)
        threading.Thread(target=self._watch, daemon=True, name=f"watch-{self._job.device}").start()

    def begin(self, rows: int) -> None:
        """Let it run the next batch."""
        try:
            self._ours.send(rows.to_bytes(COUNT_BYTES, "little"))
        except OSError as error:
            self._lost(f"the process of {self._job.device} is gone ({error})")

    def wait_read(self) -> None:
        """Wait until it has copied the inputs."""
        if not self._ours.recv(1):
            self._lost(f"the process of {self._job.device} is gone")

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._ours.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._closed:
            self._lost(f"the process of {self._job.device} ended with status {status}")


class SplitInputs:
    """The memory through which the inputs of a batch reach all processes.

    Args:
        input: One raw input chunk.
        rows: The most rows of a batch.
        descriptor: Its descriptor; -1 to make it.
    """

    def __init__(self, input: ChunkSpec, rows: int, descriptor: int = -1) -> None:
        nbytes = max(1, rows * input.nbytes)
        if descriptor < 0:
            descriptor = os.memfd_create("penstock-split", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        self.descriptor = descriptor
        with os.fdopen(os.dup(descriptor), "r+b") as file:
            memory = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        self.chunk_B: Array = memory.view(np.ndarray)[: rows * input.nbytes].view(input.numpy_dtype)
        self.chunk_B = self.chunk_B.reshape(rows, *input.shape)


@final
class SplitPart:
    """The part of a network in one process.

    Args:
        network: The network, with this process's slices, on its device.
        input: One raw input chunk.
        output: One output chunk.
        device: The device.
    """

    def __init__(self, network: GpuNetwork, input: ChunkSpec, output: ChunkSpec, device: str) -> None:
        self._network, self._input, self._output, self._device = network, input, output, device

    def run(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        network = self._network
        feeds, lengths = feeds_of(self._input, chunk_B)
        given = feeds | lengths
        with torch.inference_mode():
            arguments = [torch.from_numpy(given[name]).to(self._device) for name in network.arguments]
            results = [result.cpu().numpy() for result in network(*arguments)]
        return chunks_of(self._output, dict(zip(network.results, results, strict=True)), lengths)


@final
class SplitExecutor(Executor):
    """A one-shot network over several processes, each with its slices of the weights.

    Args:
        part: The part of this process.
        group: The processes.
        helpers: The others.
        inputs: The memory with the inputs.
        meeting: The folder in which they met.
        input: One raw input chunk.
        output: One output chunk.
    """

    def __init__(
        self,
        part: SplitPart,
        group: SplitGroup,
        helpers: Sequence[Helper],
        inputs: SplitInputs,
        meeting: "tempfile.TemporaryDirectory[str]",
        *,
        input: ChunkSpec,
        output: ChunkSpec,
    ) -> None:
        self.input, self.output, self.max_rows = input, output, len(inputs.chunk_B)
        self._part, self._group, self._helpers, self._inputs = part, group, helpers, inputs
        self._meeting = meeting

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch, in all processes."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        use_threads(self.threads)
        rows = len(chunk_B)
        own = self._inputs.chunk_B[:rows]
        own[...] = chunk_B
        for helper in self._helpers:
            helper.begin(rows)
        try:
            return self._part.run(own)
        finally:
            # Where the network raises, the others may not have come to the inputs yet.
            for helper in self._helpers:
                helper.wait_read()

    def close(self) -> None:
        """End the other processes."""
        for helper in self._helpers:
            helper.close()
        self._group.close()
        with suppress(OSError):
            os.close(self._inputs.descriptor)
        self._meeting.cleanup()


def new_meeting() -> tuple["tempfile.TemporaryDirectory[str]", Path]:
    """Make a folder, and name the file in it, in which processes find each other."""
    folder = tempfile.TemporaryDirectory(prefix="penstock-split-")
    return folder, Path(folder.name) / "meeting"


def part_of(module: nn.Module, input: ChunkSpec, output: ChunkSpec, precision: str, device: str) -> SplitPart:
    """Put a network that is split to its device.

    Raises:
        ApplicationError: The network does not take tensors of these names.
        ServeError: The device has too little memory.
    """
    try:
        network: Any = GpuNetwork(module, input, output, precision).to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ServeError(
            f"{device} has too little memory for its slice of the network; take more devices, as "
            f"{device}+..., or a shorter --precision."
        ) from error
    return SplitPart(network, input, output, device)
