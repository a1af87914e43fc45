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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles, read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import PenstockError, ServeError
from penstock.core.machine.onnx_session import onnx_errors
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor, StepInput
from penstock.runtime.onnx.onnx_cache import cached_graph, exporter_options, is_cached, mark_unusable, onnx_executor
from penstock.runtime.onnx.prepare_session import open_prepare
from penstock.runtime.runnable import Runnable

log = logging.getLogger(__name__)

K = TypeVar("K", int, str)

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


def make_runnable(bundle: Path, how: Execution, slots: Callable[[Application], int]) -> Runnable:
    """Verify a bundle and choose its executor and number of threads.

    Args:
        bundle: Its folder.
        how: Device, executor and precision.
        slots: Gives the number of streams or requests of an application.

    Raises:
        BundleError: The bundle is damaged, or its application or its answers changed.
        ApplicationError: Its application cannot be found.
        ServeError: The requested executor or GPU cannot run it.
    """
    how.progress.report("reading the bundle")
    files = read_bundle(bundle)
    found = bundle_application(files, how.app, accept_changed=how.accept_changed)
    application = found.application
    open_prepare(files)
    if "+" in how.device:
        # Imported here: it loads torch.
        from penstock.runtime.split.split_choice import split_runnable

        with how.progress.step(f"splitting the network over {how.device}", application.name):
            return split_runnable(files, found, how)
    if application.generate is not None:
        return _generating_runnable(files, found, how)
    several = application.input.dims or len(application.inputs) > 1 or application.output.tensors[1:]
    if how.exact and (several or application.finish is not None):
        raise ServeError(
            f"--exact needs one input and one output of fixed size without a finish, and {application.name!r} has "
            f"{application.input.describe()} and {application.output.describe()}: the last bits of an answer depend on "
            f"the length to which its batch is padded. Leave --exact out."
        )
    if how.device != "cpu":
        # Imported here: serving on a CPU does not load torch.
        from penstock.runtime.gpu.gpu_choice import gpu_runnable

        with how.progress.step(f"preparing the network on {how.device}", application.name):
            return gpu_runnable(files, found, how, slots(application))
    if how.precision not in ("auto", "fp32"):
        raise ServeError(
            f"--precision is {how.precision}, but a CPU serves fp32 alone. Leave it out, or name a --device."
        )
    if how.exact and how.choice == "onnx":
        _fallback(how, files, "its answers are not known to be exact")
    if application.live is not None or how.exact:
        return _streaming_runnable(files, found, how, slots(application))
    examples, fallback = files.golden.inputs, ""
    if how.choice != "torch":
        try:
            if files.changed_sources(found) and not is_cached(files, how.cache):
                # Imported here: it loads torch. Before the export, which takes long.
                from penstock.runtime.load_weights import check_weights

                check_weights(found.model, files.weights)
            executor = _make_onnx(files, how, partial(onnx_executor, files), examples)
            return Runnable(application=application, files=files, executor=executor, runs_by="ONNX Runtime")
        except ServeError as error:
            fallback = _fallback(how, files, str(error))
    # Imported here: serving by ONNX Runtime does not load torch.
    from penstock.runtime.load import make_predictor

    executor = make_predictor(files, found).executor
    assert isinstance(executor, Executor), executor
    _choose_torch_threads(executor, examples, how.cores)
    return Runnable(application=application, files=files, executor=executor, fallback=fallback)


def _generating_runnable(files: BundleFiles, found: FoundApplication, how: Execution) -> Runnable:
    # Imported here: serving by ONNX Runtime does not load torch.
    from penstock.runtime.generation.generation_choice import generation_executor

    return Runnable(application=found.application, files=files, executor=generation_executor(files, found, how))


def _fallback(how: Execution, files: BundleFiles, reason: str) -> str:
    """Say why torch runs a network instead of ONNX Runtime.

    Raises:
        ServeError: ONNX Runtime was asked for.
    """
    reason = reason.rstrip(".")
    if how.choice == "onnx":
        raise ServeError(f"ONNX Runtime cannot run {files.folder}: {reason}. Leave out --executor onnx.")
    fallback = (
        f"torch runs {files.manifest.name}, often slower, because ONNX Runtime cannot: {reason}. Mend that, or accept "
        f"it with --executor torch."
    )
    log.warning("%s", fallback)
    return fallback


def _make_onnx(files: BundleFiles, how: Execution, make: Callable[[Path, int], Executor], examples: Array) -> Executor:
    """Make the executor of a bundle's exported graph; `make` is given the graph and the number of threads.

    Raises:
        ServeError: There is no graph that can be used; the error is the reason.
    """
    options = exporter_options(how.app, accept_changed=how.accept_changed)
    exported = partial(
        cached_graph, files, how.cache, options, how.progress, stall_s=how.export_stall_s, unexported=how.unexported
    )
    found_cached = is_cached(files, how.cache)
    graph = exported()
    unusable = (PenstockError, *onnx_errors())
    if found_cached:
        try:
            make(graph, 1)
        except unusable:
            # The cached file may be truncated: export it again.
            with suppress(OSError):
                graph.unlink()
            graph = exported()
    how.progress.report("checking the exported network")
    try:
        made = {threads: make(graph, threads) for threads in {1, how.cores}}
    except unusable as error:
        reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        mark_unusable(graph, reason)
        raise ServeError(reason) from error
    return made[_choose_threads(made.__getitem__, examples, how.cores, "ONNX Runtime")]


def _choose_torch_threads(executor: Executor, examples: Array, cores: int) -> None:
    def with_threads(threads: int) -> Executor:
        executor.threads = threads
        return executor

    with_threads(_choose_threads(with_threads, examples, cores, "torch"))


def resolved_device(device: str, choice: str) -> str:
    """Resolve `"auto"`: a GPU where there is one, unless a CPU executor was requested."""
    if device != "auto":
        return device
    # Without a driver, there is no need to load torch.
    if choice != "auto" or not (Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _streaming_runnable(files: BundleFiles, found: FoundApplication, how: Execution, slots: int) -> Runnable:
    from penstock.runtime.load import as_streaming, make_predictor, streaming_executor
    from penstock.runtime.onnx.streaming_onnx import onnx_streaming_executor
    from penstock.runtime.state_table import affordable_slots

    predictor = make_predictor(files, found)
    application = found.application
    slots = affordable_slots(as_streaming(application, predictor.module), slots, _free_bytes() // how.sharing)
    most = EXACT_ROWS if how.exact else min(slots, MAX_STREAM_ROWS)
    executor = streaming_executor(application, predictor.module, slots=slots, max_rows=most, exact=how.exact)
    example = first_chunk(application, files.golden.inputs)[None]
    _choose_torch_threads(executor, example, how.cores)
    runnable = Runnable(application=application, files=files, executor=executor, slots=slots)
    if how.choice == "torch" or how.exact:
        return runnable
    try:
        stepped = _make_onnx(files, how, partial(onnx_streaming_executor, predictor, executor), example)
    except ServeError as error:
        return replace(runnable, fallback=_fallback(how, files, str(error)))
    if how.choice == "auto" and _fastest({"torch": executor, "ONNX Runtime": stepped}, example) is executor:
        return runnable
    return replace(runnable, executor=stepped, runs_by="ONNX Runtime")


def _fastest(made: dict[str, Executor], examples: Array) -> Executor:
    # Alternating rounds, and the best of each: the speed of a shared machine varies over time.
    times_s, said = _trial(made.__getitem__, list(made), examples, TRIAL_ROUNDS)
    name = min(times_s, key=times_s.__getitem__)
    log.info("%s; executor of the streams: %s", said, name)
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
    times_s, said = _trial(made, [1, cores], examples)
    threads = cores if times_s[cores] < MAX_TIME_SHARE * times_s[1] else 1
    log.info("%s: %s; threads of the network: %d", runner, said, threads)
    return threads


def _trial(
    made: Callable[[K], Executor], choices: list[K], examples: Array, rounds: int = 1
) -> tuple[dict[K, float], str]:
    """Measure a batch with each choice; returns seconds, and a description of them."""
    batch = _trial_batch(made(choices[0]), examples)
    measured = [{choice: _batch_s(made(choice), batch) for choice in choices} for _ in range(rounds)]
    times_s = {choice: min(each[choice] for each in measured) for choice in choices}
    said = ", ".join(f"{seconds * 1e3:.2f} ms with {choice}" for choice, seconds in times_s.items())
    return times_s, f"{batch.slots_B.size} rows take {said}"


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
