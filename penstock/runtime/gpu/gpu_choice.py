"""Bundles on a GPU: the precision and layout in which the network runs, checked against the golden examples.

Of `auto`, the fastest way is taken whose golden answers hold: fp32, tf32 or bf16. Where the output has labels, it must
also name the same label for each golden example. The choice is remembered in the cache, for the next start.
"""

import json
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles
from penstock.core.bundles.golden import Golden
from penstock.core.errors import ApplicationError, GoldenMismatch, PenstockError
from penstock.core.finish import network_output
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor import StepInput
from penstock.runtime.gpu.compile_ahead import CompileAhead
from penstock.runtime.gpu.compile_records import CompileRecords
from penstock.runtime.gpu.compiled_files import gpu_place
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.gpu.devices import check_gpu
from penstock.runtime.gpu.gpu_network import (
    GpuNetwork,
    LiveNetwork,
    OneTensor,
    gpu_network,
    stateless_step,
    with_folded_norms,
)
from penstock.runtime.gpu.precision import AUTO, DTYPES, GpuWay, loosened, ways_of
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor
from penstock.runtime.load import Predictor, as_streaming, make_predictor, unchecked_predictor
from penstock.runtime.runnable import Runnable
from penstock.runtime.state_table import affordable_slots
from penstock.runtime.streaming_executor import StatefulNetwork, Stateless
from penstock.runtime.whole_signals import run_in_chunks

log = logging.getLogger(__name__)

# Rows of one-shot networks and of live streams; more rows take longer than any latency budget.
MAX_ROWS, MAX_STREAM_ROWS = 1024, 4096
# Where lengths vary; there is a CUDA graph for each of several lengths.
MAX_RECORD_ROWS = 512
# The only batch size with --exact.
EXACT_ROWS = 256
# Precisions are compared by the time of so many rows.
TRIAL_ROWS = 64
TRIAL_RUNS = 5
# A less accurate precision must take at most this share of the time.
WORTH = 0.95
CHOICES = "way-{precision}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """A way whose golden answers hold.

    Args:
        way: The way.
        network: The network in it, on the GPU.
        ms: Time of a batch of the golden examples, or of `TRIAL_ROWS` rows.
        difference: Largest difference of the golden answers.
    """

    way: GpuWay
    network: nn.Module
    ms: float
    difference: float


def gpu_runnable(files: BundleFiles, found: FoundApplication, how: Execution, slots: int) -> Runnable:
    """Check a bundle on the GPU, the first time on the CPU too, and make its executor there.

    Args:
        files: The verified bundle.
        found: Its application.
        how: Device and precision.
        slots: The number of streams or requests; fewer may fit into the GPU's memory.

    Raises:
        BundleError: Its answers differ too much.
        ApplicationError: The network cannot run in the precision, or cannot be captured in CUDA graphs.
        ServeError: There is no such GPU, or too little memory.
    """
    device, application = how.device, found.application
    check_gpu(device)
    several = isinstance(application.input, RecordSpec) or isinstance(application.output, RecordSpec)
    place = gpu_place(files, found, how.cache, device)
    # Where this bundle, with these sources and versions, was served before, its answers on the CPU were right: they
    # take seconds. Those on the GPU are checked in any case.
    was_served = _choice_file(place, how).exists()
    predictor = (unchecked_predictor if was_served else make_predictor)(files, found)
    if application.live is not None:
        return _live_runnable(predictor, how, slots, place)
    predictor = with_folded_norms(predictor, place)
    if several or application.finish is not None:
        chosen, said = _chosen(partial(_tried_record, predictor, how), predictor, how, place)
        assert isinstance(chosen.network, GpuNetwork), chosen
        executor = _record_executor(application, chosen.network, application.output, how, timed=how.compile)
        executor.capture_grid()
        shapes = None
        if how.compile and executor.graphs:
            shapes = CompileRecords(executor, chosen.network, predictor, how, chosen.way, place)
        return Runnable(application=application, files=files, executor=executor, runs_by=said, compile_ahead=shapes)
    chosen, said = _chosen(partial(_tried_one_tensor, predictor, how), predictor, how, place)
    assert isinstance(chosen.network, GpuNetwork), chosen
    most = EXACT_ROWS if how.exact else min(how.max_rows or MAX_ROWS, MAX_ROWS)
    executor = _one_tensor_executor(application, chosen.network, how, slots=slots, rows=most, timed=how.compile)
    ahead = None
    if how.compile and not how.exact:
        ahead = CompileAhead(executor, chosen.network, predictor, how, chosen.way, place)
    return Runnable(
        application=application, files=files, executor=executor, slots=slots, runs_by=said, compile_ahead=ahead
    )


def _live_runnable(predictor: Predictor, how: Execution, slots: int, place: Path) -> Runnable:
    application = predictor.application
    chosen, said = _chosen(partial(_tried_live, predictor, how), predictor, how, place, live=True)
    module = as_streaming(application, predictor.module)
    slots = affordable_slots(module, slots, torch.cuda.mem_get_info(how.device)[0] // how.sharing)
    most = EXACT_ROWS if how.exact else min(how.max_rows or MAX_STREAM_ROWS, MAX_STREAM_ROWS)
    executor = CudaGraphExecutor(_live_network(predictor, how, chosen.way, slots), max_rows=most, exact=how.exact)
    return Runnable(application=application, files=predictor.files, executor=executor, slots=slots, runs_by=said)


def _chosen(
    tried: Callable[[GpuWay], _Tried], predictor: Predictor, how: Execution, place: Path, *, live: bool = False
) -> tuple[_Tried, str]:
    """Choose the way to run a network.

    Args:
        tried: Tries a way.
        predictor: The network.
        how: The precision.
        place: The folder that remembers the choice.
        live: The states of its streams are in one precision and layout.

    Returns:
        The way, and a description of it.

    Raises:
        PenstockError: Why it cannot run in the most accurate precision, where it can in none.
    """
    name = predictor.application.name
    choice = _choice_file(place, how)
    chosen = _remembered(tried, how, choice)
    if chosen is None:
        times: list[str] = []
        errors: list[PenstockError] = []
        for precision in AUTO if how.precision == "auto" else (how.precision,):
            with how.progress.step(f"trying {precision} on {how.device}", name):
                try:
                    each = _first_that_holds(tried, ways_of(precision)[: 1 if live else None])
                except PenstockError as error:
                    errors.append(error)
                    # That the recorded precision does not hold is news; that others do not is usual.
                    level = logging.WARNING if precision == "fp32" else logging.INFO
                    log.log(level, "%s is not served in %s: %s", name, precision, error)
                    continue
            times.append(f"{precision} {each.ms:.2f} ms")
            # The others are not kept: each is a copy of the network on the GPU.
            if chosen is None or each.ms < WORTH * chosen.ms:
                chosen = each
            del each
        if chosen is None:
            raise errors[0]
        if not live:
            chosen = _in_faster_layout(tried, chosen)
        log.info("%s on %s: a batch takes %s; chosen is %s", name, how.device, ", ".join(times), chosen.way)
        _remember(choice, chosen.way)
    # The memory of the trials counts as free for what is made next.
    torch.cuda.empty_cache()
    log.info(
        "%s in %s on %s: the golden examples differ by %.3g",
        name,
        chosen.way,
        torch.cuda.get_device_name(how.device),
        chosen.difference,
    )
    return chosen, f"torch in {chosen.way}"


def _choice_file(place: Path, how: Execution) -> Path:
    return place / CHOICES.format(precision=how.precision)


def _first_that_holds(tried: Callable[[GpuWay], _Tried], ways: list[GpuWay]) -> _Tried:
    for way in ways[:-1]:
        try:
            return tried(way)
        except PenstockError as error:
            log.info("not in %s: %s", way, error)
    return tried(ways[-1])


def _in_faster_layout(tried: Callable[[GpuWay], _Tried], chosen: _Tried) -> _Tried:
    if not any(isinstance(layer, nn.Conv2d) for layer in chosen.network.modules()):
        return chosen
    try:
        other = tried(replace(chosen.way, channels_last=True))
    except PenstockError as error:
        log.info("not channels last: %s", error)
        return chosen
    return other if other.ms < WORTH * chosen.ms else chosen


def _remembered(tried: Callable[[GpuWay], _Tried], how: Execution, choice: Path) -> _Tried | None:
    try:
        way = GpuWay.from_json(json.loads(choice.read_text()))
        return tried(way)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, PenstockError) as error:
        log.warning("the way that served this bundle on %s before is tried anew: %s", how.device, error)
        return None


def _remember(choice: Path, way: GpuWay) -> None:
    try:
        choice.parent.mkdir(parents=True, exist_ok=True)
        choice.write_text(json.dumps(way.to_json()) + "\n")
    except OSError as error:
        log.warning("the cache %s cannot be written (%s): the next start tries all ways again", choice.parent, error)


def _tried_one_tensor(predictor: Predictor, how: Execution, way: GpuWay) -> _Tried:
    application, golden = predictor.application, loosened(predictor.files.golden, way.precision)
    with _named(application, way, how.device):
        network = gpu_network(predictor.module, application.input, application.output, way, how.device)

        def run(rows: int) -> _Tried:
            executor = _one_tensor_executor(application, network, how, slots=rows, rows=rows, only=True)
            batch = _one_shot_batch(golden.inputs[np.arange(rows) % len(golden.inputs)])
            difference = _checked(
                predictor, golden, how, lambda inputs: executor.step(_one_shot_batch(inputs)).output_B.copy()
            )
            ms = _ms(lambda: executor.step(batch)) * TRIAL_ROWS / rows
            return _Tried(way=way, network=network, ms=ms, difference=difference)

        least = len(golden.inputs)
        try:
            return run(max(least, min(TRIAL_ROWS, how.max_rows or TRIAL_ROWS)))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            log.info("%s on %s: the memory does not suffice for %d rows", application.name, how.device, TRIAL_ROWS)
        return run(least)


def _tried_live(predictor: Predictor, how: Execution, way: GpuWay) -> _Tried:
    application, golden = predictor.application, loosened(predictor.files.golden, way.precision)
    rows = len(golden.inputs)
    with _named(application, way, how.device):
        network = _live_network(predictor, how, way, rows)
        executor = CudaGraphExecutor(network, max_rows=rows, exact=True)
        difference = _checked(predictor, golden, how, lambda inputs: run_in_chunks(executor, inputs))
        ms = _ms(lambda: run_in_chunks(executor, golden.inputs))
        return _Tried(way=way, network=predictor.module, ms=ms, difference=difference)


def _tried_record(predictor: Predictor, how: Execution, way: GpuWay) -> _Tried:
    application, golden = predictor.application, loosened(predictor.files.golden, way.precision)
    with _named(application, way, how.device):
        network = gpu_network(predictor.module, application.input, application.output, way, how.device)
        if application.finish is not None and golden.network is not None:
            between = network_output(application.finish)
            whole = GpuNetwork(network.network.module, application.input, between, way.precision)
            checked = _record_executor(application, whole, between, how, memory=0.0, rows=len(golden.network))
            golden.check_network(checked.predict)
        executor = _record_executor(application, network, application.output, how)

        def replayed(inputs: Array) -> Array:
            executor.capture_for(inputs)
            return executor.predict(inputs)

        def one_by_one(inputs: Array) -> Array:
            return np.concatenate([replayed(inputs[row : row + 1]) for row in range(len(inputs))])

        def in_batches(inputs: Array) -> Array:
            most = executor.max_rows
            return np.concatenate([replayed(inputs[start : start + most]) for start in range(0, len(inputs), most)])

        # Each at the edge of its own length bucket, and all together at that of the longest.
        difference = max(_checked(predictor, golden, how, one_by_one), _checked(predictor, golden, how, in_batches))
        batch = golden.inputs[: executor.max_rows]
        return _Tried(way=way, network=network, ms=_ms(lambda: executor.predict(batch)), difference=difference)


@contextmanager
def _named(application: Application, way: GpuWay, device: str) -> Generator[None]:
    """Name the network, the precision and the device in what goes wrong while a way is tried."""
    try:
        yield
    except GoldenMismatch as error:
        raise GoldenMismatch(f"in {way} on {device}, {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        raise ApplicationError(
            f"the network of {application.name!r} cannot run in {way} on {device} in CUDA graphs ({cause}); serve it "
            f"in another precision, or with --device cpu."
        ) from error


def _checked(predictor: Predictor, golden: Golden, how: Execution, predict: Callable[[Array], Array]) -> float:
    """Check the golden examples; with `auto`, a classifier must name the same labels too."""
    answers: list[Array] = []

    def kept(inputs: Array) -> Array:
        answers.append(predict(inputs))
        return answers[-1]

    difference = golden.check(kept)
    if how.precision == "auto":
        for spec in predictor.application.output.tensors:
            if spec.labels and not predictor.application.output.dims:
                given, right = (each[spec.name] if each.dtype.names else each for each in (answers[0], golden.outputs))
                # By how much the label that is named was behind: of two that are as good, either may be named.
                named = np.take_along_axis(right, given.argmax(-1)[..., None], -1)[..., 0]
                behind = right.max(-1).astype(np.float64) - named
                tie = 2 * predictor.files.golden.agreement.tolerances[spec.name if answers[0].dtype.names else ""]
                other = int(np.count_nonzero(behind > tie))
                if other:
                    raise GoldenMismatch(
                        f"{other} labels of the golden examples' {spec.name!r} are not the recorded ones; choose "
                        f"another precision."
                    )
    return difference


def _one_tensor_executor(
    application: Application,
    network: GpuNetwork,
    how: Execution,
    *,
    slots: int,
    rows: int,
    only: bool = False,
    timed: bool = False,
) -> CudaGraphExecutor:
    frames = application.output.shape[0] if application.output.shape else 1
    stateless = Stateless(OneTensor(network), int(frames))
    # The states of one-shot networks are empty, and `run` has the weights.
    stateful = StatefulNetwork(
        Stateless(nn.Identity(), int(frames)),
        application.input_tensor,
        application.output_tensor,
        slots=slots,
        device=how.device,
        run=stateless_step(stateless),
    )
    return CudaGraphExecutor(stateful, max_rows=rows, exact=how.exact or only, timed=timed, limit_s=how.batch_s)


def _live_network(predictor: Predictor, how: Execution, way: GpuWay, slots: int) -> StatefulNetwork:
    application = predictor.application
    return StatefulNetwork(
        LiveNetwork(as_streaming(application, predictor.module), way.precision),
        application.input_tensor,
        application.output_tensor,
        slots=slots,
        device=how.device,
        dtype=DTYPES.get(way.precision),
    )


def _record_executor(
    application: Application,
    network: GpuNetwork,
    output: ChunkSpec,
    how: Execution,
    *,
    memory: float | None = None,
    rows: int | None = None,
    timed: bool = False,
) -> RecordGraphExecutor:
    free_bytes = torch.cuda.mem_get_info(how.device)[0] // how.sharing
    return RecordGraphExecutor(
        network,
        application.input,
        output,
        max_rows=rows or min(how.max_rows or MAX_RECORD_ROWS, MAX_RECORD_ROWS),
        device=how.device,
        limit_bytes=int(free_bytes * (how.graph_memory if memory is None else memory)),
        timed=timed,
    )


def _one_shot_batch(inputs: Array) -> StepInput:
    rows = len(inputs)
    ones = np.ones(rows, np.int64)
    return StepInput(slots_B=np.arange(rows), chunk_B=inputs, length_B=ones, fresh_B=ones > 0)


def _ms(run: Callable[[], Any]) -> float:
    times_s: list[float] = []
    for _ in range(TRIAL_RUNS + 1):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return 1e3 * min(times_s[1:])
