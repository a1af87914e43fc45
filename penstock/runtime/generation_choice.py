"""Choice of device and threads for a network whose answers take steps. torch runs it; ONNX Runtime does not."""

import logging
import time

import torch

from penstock.core.bundle import BundleFiles
from penstock.core.errors import GoldenMismatch, ServeError
from penstock.core.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.generation_executor import MAX_ROWS, GenerationExecutor
from penstock.runtime.load import make_predictor

log = logging.getLogger(__name__)

# More threads are used if they shorten an answer to this share of its time.
MAX_TIME_SHARE = 0.75
TRIAL_STEPS = 8
TRIAL_ROWS = 16


def generation_executor(files: BundleFiles, found: FoundApplication, how: Execution) -> GenerationExecutor:
    """Verify a network that generates on its device, and make its executor.

    Raises:
        BundleError: Its answers differ from the recorded ones.
        ServeError: It cannot be run as requested.
    """
    name = found.application.name
    wrong = {"--executor onnx": how.choice == "onnx", "--exact": how.exact, "--precision": how.precision != "fp32"}
    for option, given in wrong.items():
        if given:
            raise ServeError(
                f"{option} is given, but {name!r} generates, and its answers take steps of torch in fp32; leave it out."
            )
    if how.device != "cpu" and not torch.cuda.is_available():
        raise ServeError(f"--device is {how.device}, but this torch sees no GPU; leave it out, or repair the driver.")
    predictor = make_predictor(files, found)
    executor = predictor.executor
    assert isinstance(executor, GenerationExecutor), executor
    log.warning(
        "executor torch for %s on %s: its answers take steps, which ONNX Runtime does not run here", name, how.device
    )
    if how.device == "cpu":
        _choose_threads(executor, files.golden.inputs, how.cores)
        return executor
    torch.backends.cudnn.allow_tf32 = False
    module = predictor.module.to(how.device)
    on_gpu = GenerationExecutor(module, found.application, max_rows=how.max_rows or MAX_ROWS, device=how.device)
    try:
        difference = files.golden.check(on_gpu.predict)
    except GoldenMismatch as error:
        raise GoldenMismatch(f"on {how.device}, {error}") from error
    log.info("golden examples on %s: difference %.3g", how.device, difference)
    return on_gpu


def _choose_threads(executor: GenerationExecutor, examples: Array, cores: int) -> None:
    """Use all cores if they make steps clearly faster, else one."""
    torch.set_num_threads(1)
    if cores == 1:
        return
    times_s: dict[int, float] = {}
    for threads in (1, cores):
        torch.set_num_threads(threads)
        times_s[threads] = min(_trial_s(executor, examples) for _ in range(2))
    threads = cores if times_s[cores] < MAX_TIME_SHARE * times_s[1] else 1
    torch.set_num_threads(threads)
    log.info(
        "%s; threads of the network: %d", ", ".join(f"{s * 1e3:.2f} ms with {n}" for n, s in times_s.items()), threads
    )


def _trial_s(executor: GenerationExecutor, examples: Array) -> float:
    start_s = time.perf_counter()
    steps = executor.run(examples[[row % len(examples) for row in range(TRIAL_ROWS)]])
    for _, _ in zip(range(TRIAL_STEPS), steps, strict=False):
        pass
    return time.perf_counter() - start_s
