"""Choice of the executor that serves a bundle.

On a CPU it is ONNX Runtime with the exported graph (figures: docs/decisions/007-executor.md). Where a network cannot be
exported, or its graph gives other answers, torch runs it, and the log has the reason.

For live applications, ONNX Runtime and torch are both measured, and the faster one runs
(docs/decisions/018-streams-by-onnx.md).
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.core.application import Application
from penstock.core.bundle import BundleFiles, bundle_application, read_bundle
from penstock.core.errors import ServeError
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput

log = logging.getLogger(__name__)

Choice = Literal["auto", "onnx", "torch"]
CHOICES: tuple[Choice, ...] = ("auto", "onnx", "torch")

# More threads are used if they shorten a trial batch to this share of its time.
MAX_TIME_SHARE = 0.75
TRIAL_ROWS = 16
TRIAL_RUNS = 5
TRIAL_S = 0.1
TRIAL_ROUNDS = 3
# The largest batch of live streams on a CPU; the largest worthwhile one is far smaller.
MAX_STREAM_ROWS = 1024
# The only batch size with --exact.
EXACT_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """A verified bundle and its executor.

    Args:
        application: Its application.
        files: The bundle.
        executor: The executor of its network.
        slots: Streams whose states fit into memory; None where the executor keeps no states.
    """

    application: Application
    files: BundleFiles
    executor: Executor
    slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Device, executor and precision of a network.

    Args:
        cache: The folder of exported graphs.
        cores: CPU cores that a network may use.
        sharing: Engines on the device, which divide its free memory.
        choice: On a CPU, `"auto"` takes ONNX Runtime where it can, and for live streams where it is faster; the others
            force one executor.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        precision: `"fp32"`, or on a GPU `"bf16"` or `"fp16"`.
        max_rows: A limit of the batch on a GPU; None for the GPU's own.
        exact: Pad every batch to one size, so that an answer is bitwise independent of the other rows.
    """

    cache: Path
    cores: int
    sharing: int = 1
    choice: Choice = "auto"
    device: str = "cpu"
    precision: str = "fp32"
    max_rows: int | None = None
    exact: bool = False


def make_runnable(
    bundle: Path, *, app: str | None, accept_changed: bool, how: Execution, slots: Callable[[Application], int]
) -> Runnable:
    """Verify a bundle and choose its executor and number of threads.

    Args:
        bundle: Its folder.
        app: Reference of the application, if it moved.
        accept_changed: Accept an application whose sources changed, if the golden examples still agree.
        how: Device, executor and precision.
        slots: Gives the number of streams or requests of an application.

    Raises:
        BundleError: The bundle is damaged, or its application or its answers changed.
        ApplicationError: Its application cannot be found.
        ServeError: The requested executor or GPU cannot run it.
    """
    files = read_bundle(bundle)
    found = bundle_application(files, app)
    files.check_sources(found, accept_changed=accept_changed)
    if files.prepare is not None:
        # Imported here: serving with torch alone does not load ONNX Runtime.
        from penstock.runtime.prepare_session import open_prepare

        open_prepare(files)
    if how.device != "cpu":
        # Imported here: serving on a CPU does not load torch.
        from penstock.runtime.gpu_precision import gpu_executor

        predictor, executor, fitting = gpu_executor(
            bundle,
            app=app,
            accept_changed=accept_changed,
            device=how.device,
            precision=how.precision,
            slots=slots(found.application),
            max_rows=how.max_rows,
            exact=how.exact,
            sharing=how.sharing,
        )
        return Runnable(application=predictor.application, files=predictor.files, executor=executor, slots=fitting)
    if how.precision != "fp32":
        raise ServeError(
            f"--precision is {how.precision}, but a CPU serves fp32 alone. Leave it out, or name a --device."
        )
    options = [*(["--app", app] if app else []), *(["--accept-changed-app"] if accept_changed else [])]
    if how.exact and how.choice == "onnx":
        _fall_back(how.choice, bundle, found.application, "its answers are not known to be exact")
    if found.application.live is not None or how.exact:
        return _streaming_runnable(bundle, app, accept_changed, how, slots(found.application), options)
    if how.choice != "torch":

        def make(graph: Path, threads: int) -> Executor | str:
            from penstock.runtime.onnx_cache import onnx_executor

            return onnx_executor(files, graph, threads)

        executor = _make_onnx(files, how.cache, options, make, files.golden.inputs, how.cores)
        if isinstance(executor, Executor):
            return Runnable(application=found.application, files=files, executor=executor)
        _fall_back(how.choice, bundle, found.application, executor)
    return _torch_runnable(bundle, app, accept_changed, how.cores)


def _fall_back(choice: Choice, bundle: Path, application: Application, reason: str) -> None:
    if choice == "onnx":
        raise ServeError(f"ONNX Runtime cannot run {bundle}: {reason}. Leave out --executor onnx.")
    log.warning("executor torch for %s, because ONNX Runtime cannot run it: %s", application.name, reason)


def _make_onnx(
    files: BundleFiles,
    cache: Path,
    options: list[str],
    make: Callable[[Path, int], Executor | str],
    examples: Array,
    cores: int,
) -> Executor | str:
    if find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed"
    # Imported here: serving with torch alone does not load ONNX Runtime.
    from penstock.runtime.onnx_cache import cached_graph, mark_unusable

    graph = cached_graph(files, cache, options)
    if isinstance(graph, Path) and isinstance(make(graph, 1), str):
        # The cached file may be truncated: export it again.
        with suppress(OSError):
            graph.unlink()
        graph = cached_graph(files, cache, options)
    if isinstance(graph, str):
        return graph
    made: dict[int, Executor] = {}
    for threads in {1, cores}:
        executor = make(graph, threads)
        if isinstance(executor, str):
            mark_unusable(graph, executor)
            return executor
        made[threads] = executor
    return made[_choose_threads(made.__getitem__, examples, cores, "ONNX Runtime")]


def _torch_runnable(bundle: Path, app: str | None, accept_changed: bool, cores: int) -> Runnable:
    import torch

    from penstock.runtime.load import load

    predictor = load(bundle, app=app, accept_changed=accept_changed)

    def with_threads(threads: int) -> Executor:
        torch.set_num_threads(threads)
        return predictor.executor

    with_threads(_choose_threads(with_threads, predictor.files.golden.inputs, cores, "torch"))
    return Runnable(application=predictor.application, files=predictor.files, executor=predictor.executor)


def resolved_device(device: str, choice: Choice) -> str:
    """Resolve `"auto"`: a GPU where there is one, unless a CPU executor was requested."""
    if device != "auto":
        return device
    # Without a driver, there is no need to load torch.
    if choice != "auto" or not (Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _streaming_runnable(
    bundle: Path, app: str | None, accept_changed: bool, how: Execution, slots: int, options: list[str]
) -> Runnable:
    import torch

    from penstock.runtime.load import as_streaming, load, streaming_executor
    from penstock.runtime.state_table import affordable_slots

    predictor = load(bundle, app=app, accept_changed=accept_changed)
    application = predictor.application
    slots = affordable_slots(as_streaming(application, predictor.module), slots, _free_bytes() // how.sharing)
    most = EXACT_ROWS if how.exact else min(slots, MAX_STREAM_ROWS)
    executor = streaming_executor(application, predictor.module, slots=slots, max_rows=most, exact=how.exact)

    def with_threads(threads: int) -> Executor:
        torch.set_num_threads(threads)
        return executor

    example = first_chunk(application, predictor.files.golden.inputs)[None]
    with_threads(_choose_threads(with_threads, example, how.cores, "torch"))
    runnable = Runnable(application=application, files=predictor.files, executor=executor, slots=slots)
    if how.choice == "torch" or how.exact:
        return runnable

    def make(graph: Path, threads: int) -> Executor | str:
        from penstock.runtime.streaming_executor import StreamingExecutor
        from penstock.runtime.streaming_onnx import onnx_streaming_executor

        assert isinstance(executor, StreamingExecutor), executor
        return onnx_streaming_executor(predictor, graph, executor, threads=threads)

    stepped = _make_onnx(predictor.files, how.cache, options, make, example, how.cores)
    if isinstance(stepped, str):
        _fall_back(how.choice, bundle, application, stepped)
        return runnable
    if how.choice == "auto":
        stepped = _fastest({"torch": executor, "ONNX Runtime": stepped}, example)
    return replace(runnable, executor=stepped)


def _fastest(made: dict[str, Executor], examples: Array) -> Executor:
    batch = _trial_batch(next(iter(made.values())), examples)
    # Alternating rounds, and the best of each: the speed of a shared machine varies over time.
    rounds = [{name: _batch_s(executor, batch) for name, executor in made.items()} for _ in range(TRIAL_ROUNDS)]
    times_s = {name: min(each[name] for each in rounds) for name in made}
    name = min(times_s, key=times_s.__getitem__)
    log.info(
        "%d rows take %s; executor of the streams: %s",
        batch.slots_B.size,
        ", ".join(f"{seconds * 1e3:.2f} ms with {by}" for by, seconds in times_s.items()),
        name,
    )
    return made[name]


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_chunk(application: Application, examples: Array) -> Array:
    """Take one realistic chunk from the golden examples."""
    if application.live is None:
        return examples[0]
    chunk = np.zeros(application.input.shape, application.input.numpy_dtype)
    begin = examples[0, : len(chunk)]
    chunk[: len(begin)] = begin
    return chunk


def _choose_threads(made: Callable[[int], Executor], examples: Array, cores: int, runner: str) -> int:
    """Choose all cores if they make a batch clearly faster, else one.

    Threads that gain little cost much on a busy machine, because each waits for the slowest.
    """
    if cores == 1:
        return 1
    batch = _trial_batch(made(1), examples)
    times_s = {threads: _batch_s(made(threads), batch) for threads in (cores, 1)}
    threads = cores if times_s[cores] < MAX_TIME_SHARE * times_s[1] else 1
    log.info(
        "%s: %d rows take %s; threads of the network: %d",
        runner,
        batch.slots_B.size,
        ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in sorted(times_s.items())),
        threads,
    )
    return threads


def _trial_batch(executor: Executor, examples: Array) -> StepInput:
    rows = min(TRIAL_ROWS, executor.max_rows)
    return StepInput(
        slots_B=np.arange(rows),
        chunk_B=np.repeat(examples[:1], rows, 0),
        length_B=np.full(rows, examples.shape[1] if examples.ndim > 1 else 1),
        fresh_B=np.ones(rows, np.bool_),
    )


def _batch_s(executor: Executor, batch: StepInput) -> float:
    times_s: list[float] = []
    # The first run allocates and does not count; a slow network gets fewer runs.
    while len(times_s) <= TRIAL_RUNS and sum(times_s) < TRIAL_S:
        start_s = time.perf_counter()
        executor.step(batch)
        times_s.append(time.perf_counter() - start_s)
        # Most chunks are not the first of their stream.
        batch = replace(batch, fresh_B=np.zeros_like(batch.fresh_B))
    return float(np.median(times_s[1:] or times_s))


def parse_executor_choice(text: str) -> Choice:
    """Parse --executor.

    Raises:
        ServeError: There is no such executor.
    """
    if text not in CHOICES:
        raise ServeError(f"--executor is {text!r}; it must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return text
