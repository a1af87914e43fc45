"""Compiled batches for a network that is already served: they replace its CUDA graphs one by one, where faster."""

import logging
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import final

import numpy as np
import torch

from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.gpu.compilation import (
    Compilation,
    CompiledBatch,
    CompilerProcess,
    compiler_environment,
    compilers_at_once,
)
from penstock.runtime.gpu.compiled_files import compiled_file, compiling_alone, refusal, refuse
from penstock.runtime.gpu.compiled_network import CompiledNetwork, on_device
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.gpu.gpu_network import GpuNetwork, OneTensor, stateless_step
from penstock.runtime.gpu.precision import GpuWay, loosened
from penstock.runtime.load import Predictor
from penstock.runtime.streaming_executor import Stateless

log = logging.getLogger(__name__)


@final
class CompileAhead(Compilation["_Compiler"]):
    """Compiles the batch sizes of a network in a process of its own, and gives them to its executor.

    Args:
        executor: The executor that serves, with timed graphs.
        network: Its network.
        predictor: The bundle.
        how: Device and application.
        way: The way in which the network runs.
        place: The folder of compiled batches.

    Attributes:
        unit: What is counted.
    """

    unit = "batch sizes"

    def __init__(
        self,
        executor: CudaGraphExecutor,
        network: GpuNetwork,
        predictor: Predictor,
        how: Execution,
        way: GpuWay,
        place: Path,
    ) -> None:
        super().__init__(predictor, how, way, place)
        self._executor, self._network = executor, network

    def sizes(self, largest: int) -> list[int]:
        """List the batch sizes to compile, the most used first.

        Args:
            largest: The largest batch that is worth running now.
        """
        sizes = self._executor.graph_rows
        # Powers of two first: a graph between them runs only if it is faster than the next larger one.
        return sorted(sizes, key=lambda rows: (rows & (rows - 1) != 0, rows > largest, abs(largest - rows)))

    def batches(self, sizes: Iterable[int]) -> Generator[CompiledBatch]:
        """Compile batch sizes, or take them from the cache, and replace their graphs; for a thread of its own."""
        missing: list[int] = []
        for rows in sizes:
            if self._closed:
                return
            file = compiled_file(self._place, self._way, rows)
            if reason := refusal(file):
                self._give_up(reason)
            elif not file.is_file():
                missing.append(rows)
            elif (taken := self._taken(file, rows)) is not None:
                yield taken
        try:
            yield from self._compiled(missing)
        except OSError as error:
            self._give_up(f"the cache {self._place} cannot be used: {error.strerror or error}")

    def _compiled(self, missing: list[int]) -> Generator[CompiledBatch]:
        if not missing:
            return
        with compiling_alone(self._place):
            # Another server may have compiled some meanwhile.
            wanted = [rows for rows in missing if not self._file(rows).is_file()]
            for rows in missing:
                if rows not in wanted and (taken := self._taken(self._file(rows), rows)) is not None:
                    yield taken
            count = compilers_at_once(self._how, len(wanted))
            parts = [wanted[index::count] for index in range(count)] if wanted and not self._closed else []
            environment = compiler_environment(self._how, count)
            self._compilers = [
                _Compiler(self._command(["--rows", ",".join(map(str, part))]), environment, part) for part in parts
            ]
            try:
                # Where it was closed before they were made, nothing else ends them.
                if not self._closed:
                    yield from self._results(self._compilers)
            finally:
                for compiler in self._compilers:
                    compiler.end()

    def _results(self, compilers: list["_Compiler"]) -> Generator[CompiledBatch]:
        done: SimpleQueue[tuple[_Compiler, int | None]] = SimpleQueue()
        for compiler in compilers:
            compiler.report(done)
        running = len(compilers)
        while running:
            compiler, rows = done.get()
            if self._closed:
                return
            if rows is not None:
                if (taken := self._taken(self._file(rows), rows)) is not None:
                    yield taken
                continue
            running -= 1
            if compiler.failure is not None:
                reason, rows = compiler.failure
                # Otherwise the cause may be temporary, such as a lack of memory: the next start tries again.
                if compiler.not_compilable:
                    refuse(self._file(rows), reason)
                self._give_up(reason)

    def _file(self, rows: int) -> Path:
        return compiled_file(self._place, self._way, rows)

    def _taken(self, file: Path, rows: int) -> CompiledBatch | None:
        """Check a compiled batch size by the golden examples, and let the executor use it if it is faster."""

        def use() -> CompiledBatch:
            with on_device(self._how.device), torch.inference_mode():
                compiled = CompiledNetwork(file, self._network, self._way.precision)
                golden = loosened(self._predictor.files.golden, self._way.precision)
                golden.check(lambda inputs: self._answers(compiled, inputs, rows))
            frames = self._predictor.application.output.shape[:1] or (1,)
            step = stateless_step(Stateless(OneTensor(self._network), int(frames[0])), compiled)
            return CompiledBatch(rows, self._executor.offer(rows, step))

        return self._used(file, use)

    def _answers(self, compiled: CompiledNetwork, inputs: Array, rows: int) -> Array:
        parts: list[Array] = []
        for start in range(0, len(inputs), rows):
            chunk = inputs[(start + np.arange(rows)) % len(inputs)]
            parts.append(compiled(torch.from_numpy(chunk).to(self._how.device))[0].cpu().numpy())
        return np.concatenate(parts)[: len(inputs)]


@final
class _Compiler(CompilerProcess):
    """A process that compiles some batch sizes.

    Args:
        command: Its command line.
        environment: Its environment.
        sizes: The sizes, in its order.
    """

    def __init__(self, command: list[str], environment: dict[str, str], sizes: list[int]) -> None:
        super().__init__(command, environment)
        self._left = list(sizes)

    def report(self, done: "SimpleQueue[tuple[_Compiler, int | None]]") -> None:
        """Put each size that is compiled into a queue, and None at the end."""

        def read() -> None:
            assert self._process.stdout is not None
            try:
                for line in self._process.stdout:
                    self._left.remove(int(line))
                    done.put((self, int(line)))
                self._process.wait()
            finally:
                done.put((self, None))

        threading.Thread(target=read, name="compiler", daemon=True).start()

    @property
    def failure(self) -> tuple[str, int] | None:
        """Reason of a failed compilation, with its size; None if it did not fail."""
        if not self._process.returncode or not self._left:
            return None
        return self.reason, self._left[0]
