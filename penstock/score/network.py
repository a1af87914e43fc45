"""A bundle that is run over many rows: batches of one size, of similar lengths, in an order that no clock decides."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles, read_bundle, read_manifest
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import DeviceLost, EngineLost, ScoreError, one_line
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor, StepInput
from penstock.runtime.executor_choice import make_runnable, resolved_device
from penstock.runtime.generation.generating import Generating
from penstock.runtime.onnx.onnx_executor import OnnxExecutor
from penstock.runtime.onnx.prepare_session import PrepareSession, open_prepare
from penstock.score.chunks import Chunks, Places, empty_chunks

# B rows of a batch, U frames of an output

BATCH = 256
EXECUTORS = ("auto", "onnx", "torch")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Records have room for their longest tensors; this bounds those of a block.
BLOCK_BYTES = 64 << 20
BLOCK_ROWS = 4096
# Whole signals have any length, such as minutes of sound.
BLOCK_SIGNALS = 256


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HowToRun:
    """Settings of a bundle that is loaded and run.

    Args:
        cache: The folder of exported networks.
        app: Reference of the application, if it moved.
        accept_changed: Accept changed sources of the application.
        device: `"cpu"`, `"cuda"`, `"cuda:N"` or `"auto"`.
        precision: `"fp32"`; on a GPU also `"tf32"`, `"bf16"` or `"fp16"`.
        executor: On a CPU `"onnx"` or `"torch"`; `"auto"` is ONNX Runtime where it can run the network.
        batch: Rows of a batch.
        threads: CPU threads.
    """

    cache: Path
    app: str | None = None
    accept_changed: bool = False
    device: str = "auto"
    precision: str = "fp32"
    executor: str = "auto"
    batch: int = BATCH
    threads: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunsElsewhere:
    """A bundle whose network is not loaded here, because other machines run it on their GPUs.

    Args:
        application: Its application.
        files: The bundle.
        changed_sources: See `LoadedNetwork`.
        prepare: See `LoadedNetwork`.
        runs_by: See `LoadedNetwork`.
        fallback: Empty.
    """

    application: Application
    files: BundleFiles
    changed_sources: dict[str, str]
    prepare: PrepareSession | None
    runs_by: str
    fallback: str = ""

    @classmethod
    def read(cls, bundle: Path, how: HowToRun) -> Self:
        """Verify a bundle and find its application.

        Raises:
            BundleError: The bundle is damaged, or its application changed.
            ApplicationError: Its application cannot be found.
            ScoreError: The precision is unknown.
        """
        _check_precision(how)
        files = read_bundle(bundle)
        return cls(
            application=bundle_application(files, how.app, accept_changed=how.accept_changed).application,
            files=files,
            changed_sources=_changed_sources(files, how),
            prepare=open_prepare(files),
            runs_by="torch on cuda",
        )

    def close(self) -> None:
        """Nothing runs here."""


@final
class LoadedNetwork:
    """The network of a verified bundle.

    On a CPU, ONNX Runtime takes one thread for a batch, and several batches run at once; torch takes all threads for
    one. So no measurement decides how an answer is computed, and the same rows give the same bytes each time.

    Args:
        bundle: The bundle's folder.
        how: See there.

    Attributes:
        application: Its application.
        files: The bundle.
        changed_sources: The SHA-256 of each source of the application that is not the bundle's, by its name.
        prepare: Makes an input of one raw array; None if the application has no `prepare`.
        fallback: Why it runs in a slower way than it could; empty where it does not.
        runs_by: The executor and the kind of device: `"ONNX Runtime on cpu"`.
        at_once: Blocks that the network runs at the same time.
        workers: Threads that convert rows and run batches: one more than that, for the conversion beside the network.
        is_parallel: Several batches can run at the same time.
        network_s: Seconds in which batches ran, over all threads.

    Raises:
        BundleError: The bundle is damaged, or its application or its answers changed.
        ApplicationError: Its application cannot be found.
        ScoreError: The precision is unknown.
    """

    def __init__(self, bundle: Path, how: HowToRun) -> None:
        _check_precision(how)
        device = resolved_device(how.device, "auto")
        if how.executor not in EXECUTORS:
            raise ScoreError(f"--executor is {how.executor!r}; choose {', '.join(EXECUTORS)}.")
        # Of live streams, ONNX Runtime and torch would be measured.
        measured = device == "cpu" and read_manifest(bundle).rate_hz is not None
        execution = Execution(
            cache=how.cache,
            cores=1,
            app=how.app,
            accept_changed=how.accept_changed,
            choice="torch" if measured and how.executor == "auto" else how.executor,
            device=device,
            precision=how.precision,
            max_rows=how.batch,
        )
        made = make_runnable(bundle, execution, lambda application: how.batch)
        self.application: Application = made.application
        self.files: BundleFiles = made.files
        self.prepare: PrepareSession | None = open_prepare(made.files)
        self.changed_sources = _changed_sources(made.files, how)
        self.fallback = made.fallback or made.executor.fallback
        # Without the layout of tensors, which is measured on a GPU.
        self.runs_by = f"{made.runs_by.partition(' in ')[0]} on {device.partition(':')[0]}"
        self.network_s = 0.0
        self._executor = made.executor
        self._batch = min(how.batch, made.executor.max_rows)
        self.is_parallel = isinstance(made.executor, OnnxExecutor)
        if not self.is_parallel and device == "cpu":
            made.executor.threads = how.threads
        self.at_once = how.threads if self.is_parallel else 1
        self.workers = self.at_once + 1
        self._turn, self._clock = threading.Semaphore(self.at_once), threading.Lock()

    @property
    def block_rows(self) -> int:
        """Rows that are read and answered together."""
        application = self.application
        row_bytes = application.input.nbytes + application.answer.nbytes
        most = BLOCK_ROWS if application.live is None else BLOCK_SIGNALS
        return int(np.clip(BLOCK_BYTES // row_bytes, 1, most))

    def answers(self, chunks: Chunks) -> Array | list[Array]:
        """Run the rows that have an input; waits while `at_once` other threads do.

        A row whose answer is not finite, or on which the network raises, gets an error.

        Returns:
            `[n, *answer.shape]`, or for whole signals an output of each, `[U, ...]`. What rows with errors have is of
            no use.
        """
        order = chunks.good
        whole, spec, count = self._whole(order, chunks), self.application.answer, len(chunks.array)
        if isinstance(chunks.array, list):
            signals = chunks.array
            order = order[np.argsort([len(signals[row]) for row in order], kind="stable")] if order.size else order
            answers: Any = [np.zeros((0, *spec.shape[1:]), spec.numpy_dtype)] * count
        else:
            order = self._by_length(chunks.array, order)
            answers = empty_chunks(spec, count)
        # For a whole block, so that another one's rows are converted before and after, beside the network.
        with self._turn:
            for start in range(0, len(order), self._batch):
                stop = min(start + self._batch, len(order))
                rows: Any = slice(start, stop) if whole else order[start:stop]
                self._answer(chunks, rows, answers)
        self._check(answers, chunks)
        return answers

    def _whole(self, good: Places, chunks: Chunks) -> bool:
        """True if batches are neighbours, so that they need not be gathered."""
        fixed = isinstance(chunks.array, np.ndarray) and not self.application.input.dims
        return fixed and len(good) == len(chunks.array)

    def _by_length(self, array: Array, good: Places) -> Places:
        spec = self.application.input
        if not isinstance(spec, RecordSpec) or not spec.dims or not good.size:
            return good
        lengths = spec.lengths(array)
        return good[np.lexsort([lengths[name][good] for name in reversed(list(spec.dims))])]

    def _answer(self, chunks: Chunks, rows: Places | slice, answers: Any) -> None:
        failure = self._tried(chunks, rows, answers)
        if failure is None:
            return
        places: list[int] = np.arange(len(chunks.array))[rows].tolist()
        if len(places) > 1:
            for row in places:
                self._answer(chunks, np.array([row]), answers)
            return
        self._check_alive(failure)
        chunks.errors[places[0]] = f"the network raised {type(failure).__name__}: {one_line(failure)}."

    def _tried(self, chunks: Chunks, rows: Places | slice, answers: Any) -> BaseException | None:
        try:
            if isinstance(chunks.array, list):
                places = np.arange(len(chunks.array))[rows].tolist()
                found: Any = self._timed(lambda: self._signals([chunks.array[row] for row in places]))
                for row, answer in zip(places, found, strict=True):
                    answers[row] = answer
            else:
                chunk_B = self._gathered(chunks.array, rows)
                answers[rows] = self._timed(lambda: self.run_batch(chunk_B))
        except (DeviceLost, EngineLost):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the application's code may raise anything
            return error
        return None

    def _gathered(self, array: Array, rows: Places | slice) -> Array:
        spec = self.application.input
        if isinstance(rows, slice):
            # A network run by torch may work in place, and the array may be a file's memory.
            return array[rows] if self.is_parallel else array[rows].copy()
        if isinstance(spec, RecordSpec):
            return spec.gather(array, rows, spec.empty(len(rows)))
        return array[rows]

    def _timed(self, run: Callable[[], Any]) -> Any:
        begin_s = time.perf_counter()
        found = run()
        with self._clock:
            self.network_s += time.perf_counter() - begin_s
        return found

    def run_batch(self, chunk_B: Array) -> Array:
        """Run inputs `[B, *input.shape]`, at most `batch` of them; returns answers `[B, *answer.shape]`."""
        executor = self._executor
        if isinstance(executor, Generating):
            return executor.predict(chunk_B)
        rows = len(chunk_B)
        frames = chunk_B.shape[1] if chunk_B.ndim > 1 else 1
        batch = StepInput(
            slots_B=np.arange(rows),
            chunk_B=chunk_B,
            length_B=np.full(rows, frames),
            fresh_B=np.ones(rows, np.bool_),
        )
        output_B = executor.step(batch).output_B
        # The next step may overwrite it.
        return output_B if self.is_parallel else output_B.copy()

    def _signals(self, signals: list[Array]) -> list[Array]:
        """Run whole signals of different lengths in chunks: each in a slot, until it ends."""
        executor = self._executor
        assert isinstance(executor, Executor), executor
        spec, frames = self.application.input_tensor, self.application.input.shape[0]
        lengths = np.array([len(signal) for signal in signals])
        outputs: list[list[Array]] = [[] for _ in signals]
        for start in range(0, int(lengths.max()), frames):
            rows = np.flatnonzero(lengths > start)
            chunk_B = np.zeros((len(rows), *spec.shape), spec.numpy_dtype)
            length_B = np.minimum(lengths[rows] - start, frames)
            for at, row in enumerate(rows):
                chunk_B[at, : length_B[at]] = signals[row][start : start + frames]
            result = executor.step(
                StepInput(
                    slots_B=rows,
                    chunk_B=chunk_B,
                    length_B=length_B,
                    fresh_B=np.full(len(rows), start == 0),
                    last_B=lengths[rows] <= start + frames,
                )
            )
            assert result.length_B is not None, executor
            for at, row in enumerate(rows):
                outputs[row].append(result.output_B[at, : result.length_B[at]].copy())
        return [np.concatenate(parts) for parts in outputs]

    def _check(self, answers: Array | list[Array], chunks: Chunks) -> None:
        spec = self.application.answer
        if not spec.takes_nan:
            return
        if isinstance(answers, list):
            finite = np.array([np.isfinite(answer).all() for answer in answers], np.bool_)
        elif isinstance(spec, RecordSpec):
            finite = spec.finite(answers)
        elif np.isfinite(answers).all():
            return
        else:
            finite = np.isfinite(answers.reshape(len(answers), -1)).all(1)
        for row in np.flatnonzero(~finite).tolist():
            chunks.errors.setdefault(row, "the network's answer holds NaN or infinity.")

    def _check_alive(self, failure: BaseException) -> None:
        """Raise unless the network still answers an example that it answered when it was loaded."""
        golden = self.files.golden.inputs[:1]
        alive = self._tried(Chunks(array=list(golden) if self.application.live else golden), slice(0, 1), [None])
        if alive is not None:
            raise ScoreError(
                f"the network of {self.application.name!r} runs no more ({type(failure).__name__}: "
                f"{one_line(failure)}); run the same command again, which goes on from here."
            )

    def close(self) -> None:
        """End the processes that run it."""
        if isinstance(self._executor, Executor):
            self._executor.close()


def _check_precision(how: HowToRun) -> None:
    if how.precision not in PRECISIONS:
        raise ScoreError(
            f"--precision is {how.precision!r}; choose {', '.join(PRECISIONS)}: one that a measurement chose would "
            f"not give the same answers each time."
        )


def _changed_sources(files: BundleFiles, how: HowToRun) -> dict[str, str]:
    if not how.accept_changed:
        return {}
    found = bundle_application(files, how.app, accept_changed=True)
    now = found.source_sha256()
    return {name: now.get(name, "") for name in files.changed_sources(found)}
