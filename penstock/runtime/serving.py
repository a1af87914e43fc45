"""A bundle made runnable for a server, by the executor that is fastest where it runs.

On a CPU that is ONNX Runtime over the exported graph: docs/decisions/007-executor.md has the figures. Where a
network cannot be exported, or its graph gives other answers, torch runs it, and the log says why.

The network of a live application is run with the states of its streams beside it, by whichever of the two is measured
to be faster: docs/decisions/018-streams-by-onnx.md.
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
from penstock.core.bundle import BundleFiles, found_for, read_bundle
from penstock.core.errors import ServeError
from penstock.core.spec import Array
from penstock.runtime.executor import Batch, Executor

log = logging.getLogger(__name__)

Choice = Literal["auto", "onnx", "torch"]
CHOICES: tuple[Choice, ...] = ("auto", "onnx", "torch")

# By what share more threads must shorten a batch of so many rows to be used.
WORTHWHILE_THREADS = 0.75
TRIED_ROWS = 16
TRIED_RUNS = 5
TRIED_S = 0.1
TRIED_TURNS = 3
# The largest batch of live streams on a CPU; one that is worth its time is smaller by far.
MOST_STREAMS_A_STEP = 1024
# The one batch size where answers are exact.
EXACT_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """A verified bundle and what runs its network.

    Args:
        application: What it is for.
        files: The bundle.
        executor: Runs the network.
        slots: How many streams it has room for; None where it keeps nothing of them.
    """

    application: Application
    files: BundleFiles
    executor: Executor
    slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How networks are run.

    Args:
        cache: The folder where exported graphs are kept.
        cores: That a network may use.
        sharing: Engines on the device, of whose free memory each has its part.
        choice: On a CPU, `"auto"` takes ONNX Runtime where it can, and for live streams where it is faster; the others
            take one or refuse.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        precision: `"fp32"`, or on a GPU `"bf16"` or `"fp16"`.
        max_rows: A limit of the batch on a GPU; None for no other than what it can do.
        exact: Whether every batch is filled up to one size, so that an answer is the same, bit for bit, whatever else
            is in its batch.
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
    """Verify a bundle and choose what runs it, on how many threads.

    Args:
        bundle: Its folder.
        app: Where the application is now, if it moved.
        accept_changed: Take an application whose sources changed, as long as the golden examples agree.
        how: Where and how it is run.
        slots: How many streams or requests of an application there may be.

    Raises:
        BundleError: The bundle is damaged, its application changed, or its answers did.
        ApplicationError: Its application cannot be found.
        ServeError: ONNX Runtime or a GPU was asked for and cannot run it.
    """
    files = read_bundle(bundle)
    found = found_for(files, app)
    files.check_sources(found, accept_changed=accept_changed)
    if files.prepare is not None:
        # Only here: whoever serves on torch alone need not load ONNX Runtime otherwise.
        from penstock.runtime.prepared import prepared_of

        prepared_of(files)
    if how.device != "cpu":
        # Only here: on a CPU, serving need not load torch.
        from penstock.runtime.on_gpu import gpu_executor

        predictor, executor, room = gpu_executor(
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
        return Runnable(application=predictor.application, files=predictor.files, executor=executor, slots=room)
    if how.precision != "fp32":
        raise ServeError(
            f"--precision is {how.precision}, but a CPU serves fp32 alone. Leave it out, or name a --device."
        )
    options = [*(["--app", app] if app else []), *(["--accept-changed-app"] if accept_changed else [])]
    if how.exact and how.choice == "onnx":
        _fall_back(how.choice, bundle, found.application, "nobody has shown that its answers are exact")
    if found.application.live is not None or how.exact:
        return _with_states(bundle, app, accept_changed, how, slots(found.application), options)
    if how.choice != "torch":

        def make(graph: Path, threads: int) -> Executor | str:
            from penstock.runtime.graph import onnx_executor

            return onnx_executor(files, graph, threads)

        executor = _by_onnx(files, how.cache, options, make, files.golden.inputs, how.cores)
        if isinstance(executor, Executor):
            return Runnable(application=found.application, files=files, executor=executor)
        _fall_back(how.choice, bundle, found.application, executor)
    return _by_torch(bundle, app, accept_changed, how.cores)


def _fall_back(choice: Choice, bundle: Path, application: Application, reason: str) -> None:
    if choice == "onnx":
        raise ServeError(f"ONNX Runtime cannot run {bundle}: {reason}. Leave out --executor onnx.")
    log.warning("torch runs %s, since ONNX Runtime cannot: %s", application.name, reason)


def _by_onnx(
    files: BundleFiles,
    cache: Path,
    options: list[str],
    make: Callable[[Path, int], Executor | str],
    examples: Array,
    cores: int,
) -> Executor | str:
    if find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed"
    # Only here: whoever serves on torch alone need not load it.
    from penstock.runtime.graph import cached_graph, refuse_graph

    graph = cached_graph(files, cache, options)
    if isinstance(graph, Path) and isinstance(make(graph, 1), str):
        # A file that was cut short, say: made anew, it may be right.
        with suppress(OSError):
            graph.unlink()
        graph = cached_graph(files, cache, options)
    if isinstance(graph, str):
        return graph
    made: dict[int, Executor] = {}
    for threads in {1, cores}:
        executor = make(graph, threads)
        if isinstance(executor, str):
            refuse_graph(graph, executor)
            return executor
        made[threads] = executor
    return made[_worthwhile_threads(made.__getitem__, examples, cores, "ONNX Runtime")]


def _by_torch(bundle: Path, app: str | None, accept_changed: bool, cores: int) -> Runnable:
    import torch

    from penstock.runtime.load import load

    predictor = load(bundle, app=app, accept_changed=accept_changed)

    def with_threads(threads: int) -> Executor:
        torch.set_num_threads(threads)
        return predictor.executor

    with_threads(_worthwhile_threads(with_threads, predictor.files.golden.inputs, cores, "torch"))
    return Runnable(application=predictor.application, files=predictor.files, executor=predictor.executor)


def resolved_device(device: str, choice: Choice) -> str:
    """The device that `"auto"` means: a GPU where there is one, unless what runs on a CPU was asked for."""
    if device != "auto":
        return device
    # Where the driver is not there, torch need not be loaded to be asked.
    if choice != "auto" or not (Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _with_states(
    bundle: Path, app: str | None, accept_changed: bool, how: Execution, slots: int, options: list[str]
) -> Runnable:
    import torch

    from penstock.runtime.load import load, streaming_executor, streaming_of
    from penstock.runtime.state_table import affordable_slots

    predictor = load(bundle, app=app, accept_changed=accept_changed)
    application = predictor.application
    slots = affordable_slots(streaming_of(application, predictor.module), slots, _free_bytes() // how.sharing)
    most = EXACT_ROWS if how.exact else min(slots, MOST_STREAMS_A_STEP)
    executor = streaming_executor(application, predictor.module, slots=slots, max_rows=most, exact=how.exact)

    def with_threads(threads: int) -> Executor:
        torch.set_num_threads(threads)
        return executor

    example = first_chunk(application, predictor.files.golden.inputs)[None]
    with_threads(_worthwhile_threads(with_threads, example, how.cores, "torch"))
    runnable = Runnable(application=application, files=predictor.files, executor=executor, slots=slots)
    if how.choice == "torch" or how.exact:
        return runnable

    def make(graph: Path, threads: int) -> Executor | str:
        from penstock.runtime.streaming_executor import StreamingExecutor
        from penstock.runtime.streaming_graph import stepped_by_onnx

        assert isinstance(executor, StreamingExecutor), executor
        return stepped_by_onnx(predictor, graph, executor, threads=threads)

    stepped = _by_onnx(predictor.files, how.cache, options, make, example, how.cores)
    if isinstance(stepped, str):
        _fall_back(how.choice, bundle, application, stepped)
        return runnable
    if how.choice == "auto":
        stepped = _faster({"torch": executor, "ONNX Runtime": stepped}, example)
    return replace(runnable, executor=stepped)


def _faster(made: dict[str, Executor], examples: Array) -> Executor:
    batch = _tried(next(iter(made.values())), examples)
    # In turns, and the best of them: the speed of a machine that others use changes from one moment to the next.
    turns = [{name: _batch_s(executor, batch) for name, executor in made.items()} for _ in range(TRIED_TURNS)]
    times_s = {name: min(turn[name] for turn in turns) for name in made}
    name = min(times_s, key=times_s.__getitem__)
    log.info(
        "%d rows take %s; streams are stepped by %s",
        batch.slots_B.size,
        ", ".join(f"{seconds * 1e3:.2f} ms by {by}" for by, seconds in times_s.items()),
        name,
    )
    return made[name]


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_chunk(application: Application, examples: Array) -> Array:
    """One chunk that is like real ones, of the golden examples."""
    if application.live is None:
        return examples[0]
    chunk = np.zeros(application.input.shape, application.input.numpy_dtype)
    begin = examples[0, : len(chunk)]
    chunk[: len(begin)] = begin
    return chunk


def _worthwhile_threads(made: Callable[[int], Executor], examples: Array, cores: int, runner: str) -> int:
    """All cores if that makes a batch clearly faster, else one.

    Threads that gain little cost much as soon as anything else runs on the machine: each waits for the slowest.
    """
    if cores == 1:
        return 1
    batch = _tried(made(1), examples)
    times_s = {threads: _batch_s(made(threads), batch) for threads in (cores, 1)}
    threads = cores if times_s[cores] < WORTHWHILE_THREADS * times_s[1] else 1
    log.info(
        "%s: %d rows take %s; the network gets %d threads",
        runner,
        batch.slots_B.size,
        ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in sorted(times_s.items())),
        threads,
    )
    return threads


def _tried(executor: Executor, examples: Array) -> Batch:
    rows = min(TRIED_ROWS, executor.max_rows)
    return Batch(
        slots_B=np.arange(rows),
        chunk_B=np.repeat(examples[:1], rows, 0),
        length_B=np.full(rows, examples.shape[1] if examples.ndim > 1 else 1),
        fresh_B=np.ones(rows, np.bool_),
    )


def _batch_s(executor: Executor, batch: Batch) -> float:
    times_s: list[float] = []
    # The first run allocates; a network that takes long is judged by fewer runs.
    while len(times_s) <= TRIED_RUNS and sum(times_s) < TRIED_S:
        start_s = time.perf_counter()
        executor.step(batch)
        times_s.append(time.perf_counter() - start_s)
        # Most chunks are not a stream's first.
        batch = replace(batch, fresh_B=np.zeros_like(batch.fresh_B))
    return float(np.median(times_s[1:] or times_s))


def as_choice(text: str) -> Choice:
    """A choice by its name.

    Raises:
        ServeError: There is none of that name.
    """
    if text not in CHOICES:
        raise ServeError(f"--executor is {text!r}; it must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return text
