"""Choice of device, precision and threads for a network whose answers take steps. torch runs it, not ONNX Runtime."""

import logging
import time

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles
from penstock.core.errors import ApplicationError, GoldenMismatch, ServeError
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.generation.generation_ahead import AheadExecutor
from penstock.runtime.generation.generation_executor import MAX_ROWS, GenerationExecutor
from penstock.runtime.generation.generation_graphs import CapturedGeneration, NotCapturable
from penstock.runtime.generation.generation_lanes import CudaLanes
from penstock.runtime.gpu.devices import check_gpu
from penstock.runtime.gpu.precision import loosened
from penstock.runtime.load import make_predictor

log = logging.getLogger(__name__)

# More threads are used if they shorten an answer to this share of its time.
MAX_TIME_SHARE = 0.75
TRIAL_STEPS = 8
TRIAL_ROWS = 16


def generation_executor(
    files: BundleFiles, found: FoundApplication, how: Execution
) -> GenerationExecutor | AheadExecutor:
    """Verify a network that generates on its device, and make its executor.

    Raises:
        BundleError: Its answers differ from the recorded ones.
        ServeError: It cannot be run as requested.
    """
    name = found.application.name
    wrong = {"--executor onnx": how.choice == "onnx", "--exact": how.exact}
    for option, given in wrong.items():
        if given:
            raise ServeError(
                f"{option} is given, but {name!r} generates, and its answers take steps of torch; leave it out."
            )
    if how.device == "cpu" and how.precision not in ("auto", "fp32"):
        raise ServeError(
            f"--precision is {how.precision}, but a CPU serves fp32 alone. Leave it out, or name a --device."
        )
    if how.device != "cpu":
        check_gpu(how.device)
    predictor = make_predictor(files, found)
    executor = predictor.executor
    assert isinstance(executor, GenerationExecutor), executor
    log.warning(
        "executor torch for %s on %s: its answers take steps, which ONNX Runtime does not run here", name, how.device
    )
    if how.device == "cpu":
        _choose_threads(executor, files.golden.inputs, how.cores)
        return executor
    return _on_gpu(predictor.module.to(how.device), files, found, how)


def _on_gpu(
    module: nn.Module, files: BundleFiles, found: FoundApplication, how: Execution
) -> GenerationExecutor | AheadExecutor:
    # Of `auto`, fp32: in a reduced precision, an answer of many steps takes another turn sooner or later.
    precision = "fp32" if how.precision == "auto" else how.precision
    examples = files.golden.inputs
    try:
        executor = gpu_executor(
            module,
            found.application,
            example=examples[0],
            device=how.device,
            precision=precision,
            max_rows=how.max_rows or MAX_ROWS,
            limit_bytes=int(torch.cuda.mem_get_info(how.device)[0] // how.sharing * how.graph_memory),
        )
        golden, rows = loosened(files.golden, precision), executor.max_rows
        difference = golden.check(
            lambda inputs: np.concatenate(
                [executor.predict(inputs[start : start + rows]) for start in range(0, len(inputs), rows)]
            )
        )
    except GoldenMismatch as error:
        raise GoldenMismatch(f"on {how.device} in {precision}, {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        raise ApplicationError(
            f"the network of {found.application.name!r} cannot run in {precision} on {how.device} ({cause}); serve "
            f"it in fp32, or with --device cpu."
        ) from error
    log.info("golden examples on %s in %s: difference %.3g", how.device, precision, difference)
    return executor


def gpu_executor(
    module: nn.Module,
    application: Application,
    *,
    example: Array,
    device: str,
    max_rows: int = MAX_ROWS,
    precision: str = "fp32",
    limit_bytes: int = 1 << 62,
) -> GenerationExecutor | AheadExecutor:
    """Make the executor of a network on a GPU: with CUDA graphs, or without where its step cannot be captured.

    Args:
        module: The network, in evaluation mode, on the device.
        application: Its application, which has `generate`.
        example: One raw input chunk.
        device: torch's name of the device.
        max_rows: The most rows in progress.
        precision: As in `GpuWay`.
        limit_bytes: Memory of the graphs.
    """
    try:
        graphs = CapturedGeneration(
            module,
            application,
            lanes=CudaLanes(device),
            example=example,
            max_rows=max_rows,
            precision=precision,
            limit_bytes=limit_bytes,
        )
    except NotCapturable as error:
        executor = GenerationExecutor(module, application, max_rows=max_rows, device=device, precision=precision)
        executor.fallback = f"{application.name} steps without CUDA graphs, because it cannot be captured ({error})."
        log.warning("%s", executor.fallback)
        return executor
    log.info("%s: %s", application.name, graphs.describe())
    return AheadExecutor(application, graphs)


def _choose_threads(executor: GenerationExecutor, examples: Array, cores: int) -> None:
    """Use all cores if they make steps clearly faster, else one."""
    executor.threads = 1
    if cores == 1:
        return
    times_s: dict[int, float] = {}
    for threads in (1, cores):
        executor.threads = threads
        times_s[threads] = min(_trial_s(executor, examples) for _ in range(2))
    threads = cores if times_s[cores] < MAX_TIME_SHARE * times_s[1] else 1
    executor.threads = threads
    log.info(
        "%s; threads of the network: %d", ", ".join(f"{s * 1e3:.2f} ms with {n}" for n, s in times_s.items()), threads
    )


def _trial_s(executor: GenerationExecutor, examples: Array) -> float:
    start_s = time.perf_counter()
    steps = executor.run(examples[[row % len(examples) for row in range(TRIAL_ROWS)]])
    for _, _ in zip(range(TRIAL_STEPS), steps, strict=False):
        pass
    return time.perf_counter() - start_s
