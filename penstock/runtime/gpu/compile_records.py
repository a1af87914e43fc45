"""Compiled shapes for a network of several tensors or of lengths that vary, while it is served.

There are more shapes than are worth compiling: a limited number is, and the most used come first. Until requests have
come, these are powers of two of rows in rooms that are equally long, about the largest batch of each length.
"""

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import final

import numpy as np
import torch

from penstock.core.bundles.golden import Golden
from penstock.core.named_arrays import chunks_of
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.gpu.compilation import (
    Compilation,
    CompiledBatch,
    CompilerProcess,
    compiler_environment,
    compilers_at_once,
)
from penstock.runtime.gpu.compiled_files import (
    compiled_shape_file,
    compiling_alone,
    refusal,
    refuse,
    shape_name,
)
from penstock.runtime.gpu.compiled_network import CompiledNetwork, on_device
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import Shape, size_of
from penstock.runtime.gpu.precision import GpuWay, loosened
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor
from penstock.runtime.gpu.shaped_inputs import clipped, fits, inputs_of, repeated
from penstock.runtime.load import Predictor

log = logging.getLogger(__name__)

# Each takes seconds to compile, and a second to load.
MAX_SHAPES = 40
# Compiled shapes are faster, so that more rows than before are within the budget.
REACH = 3


@final
class CompileRecords(Compilation["_ShapeCompiler"]):
    """Compiles shapes of a network in processes of their own, and gives them to its executor.

    Args:
        executor: The executor that serves, with timed graphs.
        network: Its network.
        predictor: The bundle.
        how: Device and application.
        way: The way in which the network runs.
        place: The folder of compiled shapes.

    Attributes:
        unit: What is counted.
    """

    def __init__(
        self,
        executor: RecordGraphExecutor,
        network: GpuNetwork,
        predictor: Predictor,
        how: Execution,
        way: GpuWay,
        place: Path,
    ) -> None:
        super().__init__(predictor, how, way, place)
        self._executor, self._network = executor, network
        self._tried: set[Shape] = set()
        self._columns = executor.shapes.columns()
        self.unit = "shapes"

    def sizes(self, largest: int | Sequence[int]) -> list[Shape]:
        """List the shapes to compile, the most useful first, as far as nothing was served yet.

        Args:
            largest: The largest batch that is worth running now; where lengths vary, of each length, ascending.
        """
        graphs = self._executor.graph_shapes
        ranked: list[tuple[int, int, Shape]] = []
        for level, column in enumerate(self._columns):
            most = largest if isinstance(largest, int) else largest[max(0, len(largest) - 1 - level)]
            found = [shape for shape in column if shape in graphs and shape[0] <= REACH * most]
            found = [shape for shape in found if shape[0] & (shape[0] - 1) == 0 or shape[0] == self._executor.max_rows]
            found.sort(key=lambda shape, most=most: (shape[0] > most, abs(most - shape[0])))
            ranked += [(rank, level, shape) for rank, shape in enumerate(found)]
        if len(ranked) > MAX_SHAPES:
            self.unit = "most used shapes"
        return [shape for _, _, shape in sorted(ranked)[:MAX_SHAPES]]

    def batches(self, shapes: Sequence[Shape]) -> Generator[CompiledBatch]:
        """Compile as many shapes, or take them from the cache, and replace their graphs; for a thread of its own."""
        with ExitStack() as stack:
            try:
                yield from self._compiled(list(shapes), stack)
            except OSError as error:
                self._give_up(f"the cache {self._place} cannot be used: {error.strerror or error}")

    def _compiled(self, shapes: list[Shape], stack: ExitStack) -> Generator[CompiledBatch]:
        done: SimpleQueue[tuple[_ShapeCompiler, Shape | None]] = SimpleQueue()
        count = compilers_at_once(self._how, len(shapes))
        idle: list[_ShapeCompiler] = []
        working: set[_ShapeCompiler] = set()
        alone = failed = False
        while not self._closed:
            shape = self._next(shapes)
            if shape is not None and (failed or self._is_known(shape)):
                self._tried.add(shape)
                if self._is_known(shape) and (taken := self._known(shape)) is not None:
                    yield taken
            elif shape is not None and (idle or len(self._compilers) < count):
                if not alone:
                    stack.enter_context(compiling_alone(self._place))
                    # Another server may have compiled it meanwhile.
                    alone = True
                    continue
                self._tried.add(shape)
                compiler = idle.pop() if idle else self._started(done, stack)
                compiler.compile(shape)
                working.add(compiler)
            elif working:
                compiler, compiled = done.get()
                if compiled is not None:
                    working.remove(compiler)
                    idle.append(compiler)
                    if (taken := self._taken(compiled)) is not None:
                        yield taken
                elif not self._closed:
                    failed = True
                    working.discard(compiler)
                    self._note_failure(compiler, shapes)
            else:
                return

    def _next(self, shapes: list[Shape]) -> Shape | None:
        """Choose the shape to compile next: the one in which most was computed."""
        if len(self._tried) >= len(shapes):
            return None
        uses = self._executor.graph_shapes
        rank = {shape: at for at, shape in enumerate(shapes)}
        candidates = {shape for shape in uses if shape in rank or uses[shape]} - self._tried
        return min(
            candidates, key=lambda shape: (-uses[shape] * size_of(shape), rank.get(shape, len(rank))), default=None
        )

    def _is_known(self, shape: Shape) -> bool:
        file = self._file(shape)
        return file.is_file() or refusal(file) != ""

    def _known(self, shape: Shape) -> CompiledBatch | None:
        if reason := refusal(self._file(shape)):
            self._give_up(reason)
            return None
        return self._taken(shape)

    def _started(self, done: "SimpleQueue[tuple[_ShapeCompiler, Shape | None]]", stack: ExitStack) -> "_ShapeCompiler":
        environment = compiler_environment(self._how, compilers_at_once(self._how, MAX_SHAPES))
        compiler = _ShapeCompiler(self._command([]), environment, done)
        self._compilers.append(compiler)
        stack.callback(compiler.end)
        if self._closed:
            # Nothing else ends it.
            compiler.end()
        return compiler

    def _note_failure(self, compiler: "_ShapeCompiler", shapes: list[Shape]) -> None:
        reason = compiler.reason
        # Otherwise the cause may be temporary, such as a lack of memory: the next start tries again.
        if compiler.not_compilable and compiler.shape is not None:
            # A network of which no shape was compiled would fail in all, one at each start.
            all_fail = not any(self._file(shape).is_file() for shape in shapes)
            for shape in shapes if all_fail else [compiler.shape]:
                refuse(self._file(shape), reason)
        self._give_up(reason)

    def _file(self, shape: Shape) -> Path:
        return compiled_shape_file(self._place, self._way, shape)

    def _taken(self, shape: Shape) -> CompiledBatch | None:
        """Check a compiled shape by the golden examples, and let the executor use it if it is faster."""
        file = self._file(shape)

        def use() -> CompiledBatch:
            with on_device(self._how.device), torch.inference_mode():
                compiled = CompiledNetwork(file, self._network, self._way.precision)
                self._check(compiled, shape)
            level = next((level for level, column in enumerate(self._columns) if shape in column), None)
            return CompiledBatch(shape[0], self._executor.offer(shape, compiled), level)

        return self._used(file, use)

    def _check(self, compiled: CompiledNetwork, shape: Shape) -> None:
        """Check the golden examples that the shape holds; where it holds none, their beginnings.

        Raises:
            GoldenMismatch: The answers differ from the recorded ones, or from those of the network.
        """
        golden = loosened(self._predictor.files.golden, self._way.precision)
        rooms = self._executor.shapes.rooms(shape)
        held = fits(golden.inputs, rooms)
        if held.any():
            golden = _part(golden, golden.inputs[held], golden.outputs[held])
        else:
            inputs = clipped(self._predictor.application.input, golden.inputs, rooms)
            golden = _part(golden, inputs, self._answers(self._network, inputs, shape))
        golden.check(lambda inputs: self._answers(compiled, inputs, shape))

    def _answers(self, network: torch.nn.Module, inputs: Array, shape: Shape) -> Array:
        application, rooms = self._predictor.application, self._executor.shapes.rooms(shape)
        parts: list[Array] = []
        for start in range(0, len(inputs), shape[0]):
            chunks = repeated(inputs[start : start + shape[0]], shape[0])
            given = inputs_of(application.input, chunks, rooms)
            found = network(*(torch.from_numpy(given[name]).to(self._how.device) for name in self._network.arguments))
            named = {name: each.cpu().numpy().copy() for name, each in zip(self._network.results, found, strict=True)}
            parts.append(chunks_of(application.output, named, {name: given[name] for name in rooms}))
        return np.concatenate(parts)[: len(inputs)]


def _part(golden: Golden, inputs: Array, outputs: Array) -> Golden:
    return replace(golden, inputs=inputs, outputs=outputs, raws=(), network=None)


@final
class _ShapeCompiler(CompilerProcess):
    """A process that compiles one shape after the other.

    Args:
        command: Its command line.
        environment: Its environment.
        done: Gets each shape that is compiled, and None when the process ends.

    Attributes:
        shape: The shape that it compiles, or compiled last.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        done: "SimpleQueue[tuple[_ShapeCompiler, Shape | None]]",
    ) -> None:
        super().__init__(command, environment)
        self.shape: Shape | None = None
        self._done = done
        self._thread = threading.Thread(target=self._read, name="compiler", daemon=True)
        self._thread.start()

    def compile(self, shape: Shape) -> None:
        """Begin a shape."""
        self.shape = shape
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{shape_name(shape)}\n")
            self._process.stdin.flush()
        except OSError:
            # The process has ended, which `done` says.
            log.debug("the compiler ended before %s", shape_name(shape))

    def end(self) -> None:
        """See `CompilerProcess`."""
        super().end()
        # It reads until the process has ended.
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                # Lines that the process did not read are lost.
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._done.put((self, tuple(map(int, line.split("x")))))
            self._process.wait()
        finally:
            self._done.put((self, None))
