"""Bundles on a GPU, in a precision that is checked against the golden examples."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from penstock.core.application import Application
from penstock.core.bundle import BundleFiles
from penstock.core.errors import ApplicationError, ServeError
from penstock.core.find_application import FoundApplication
from penstock.core.finish import network_output
from penstock.core.golden import Golden, largest_output
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.execution import Execution, Runnable
from penstock.runtime.executor import StepInput
from penstock.runtime.load import Predictor, as_streaming, make_predictor
from penstock.runtime.record_graph_executor import RecordGraphExecutor
from penstock.runtime.state_table import affordable_slots
from penstock.runtime.streaming_executor import StatefulNetwork
from penstock.runtime.whole_signals import run_in_chunks

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Tolerance of a reduced precision, relative to the largest golden output. Rounding errors are 2**-8 in bf16 and 2**-11
# in fp16, and accumulate over the layers of a network.
TOLERANCES = {"bf16": 0.05, "fp16": 0.01}
MAX_ROWS = 4096
# Where lengths vary; there is a CUDA graph for each of several lengths.
MAX_RECORD_ROWS = 512
# The only batch size with --exact.
EXACT_ROWS = 256


def gpu_runnable(files: BundleFiles, found: FoundApplication, how: Execution, slots: int) -> Runnable:
    """Check a bundle on the CPU and on the GPU, and make its executor there.

    Args:
        files: The verified bundle.
        found: Its application.
        how: Device and precision.
        slots: The number of streams or requests; fewer may fit into the GPU's memory.

    Raises:
        BundleError: Its answers differ too much.
        ApplicationError: The network cannot be captured in CUDA graphs.
        ServeError: There is no such GPU, or too little memory.
    """
    device, precision = how.device, how.precision
    if not torch.cuda.is_available():
        raise ServeError(f"--device is {device}, but this torch sees no GPU; leave it out, or repair the driver.")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ServeError(f"--device is {device}, but there are {torch.cuda.device_count()} GPUs, from cuda:0 on.")
    # By default cuDNN's fp32 convolutions round to the 10 bits of TF32.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    predictor, application = make_predictor(files, found), found.application
    golden = loosened(files.golden, precision)
    dtype = None if precision == "fp32" else DTYPES[precision]
    several = isinstance(application.input, RecordSpec) or isinstance(application.output, RecordSpec)
    if several or application.finish is not None:
        return _record_runnable(predictor, golden, how, dtype)
    module = as_streaming(application, predictor.module)
    network = partial(
        StatefulNetwork, module, application.input_tensor, application.output_tensor, device=device, dtype=dtype
    )
    rows = len(golden.inputs)
    try:
        checked = CudaGraphExecutor(network(slots=rows), max_rows=rows)
        difference = golden.check(lambda inputs: _answers(application, checked, inputs))
    except (RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        raise ApplicationError(
            f"the network of {application.name!r} cannot run in {precision} in CUDA graphs ({cause}); "
            f"serve it with --device cpu."
        ) from error
    log.info(
        "%s in %s on %s: the golden examples differ by %.3g, allowed is %.3g",
        application.name,
        precision,
        torch.cuda.get_device_name(device),
        difference,
        golden.tolerance,
    )
    most = EXACT_ROWS if how.exact else min(how.max_rows or MAX_ROWS, MAX_ROWS)
    slots = affordable_slots(module, slots, torch.cuda.mem_get_info(device)[0] // how.sharing)
    executor = CudaGraphExecutor(network(slots=slots), max_rows=most, exact=how.exact)
    return Runnable(application=application, files=files, executor=executor, slots=slots)


def _record_runnable(predictor: Predictor, golden: Golden, how: Execution, dtype: torch.dtype | None) -> Runnable:
    """Make the executor of a network with several tensors, lengths that vary, or a finish."""
    application = predictor.application
    module = predictor.module.to(how.device)
    free_bytes = torch.cuda.mem_get_info(how.device)[0] // how.sharing
    made = partial(RecordGraphExecutor, module, application.input, device=how.device, dtype=dtype)
    most = min(how.max_rows or MAX_RECORD_ROWS, MAX_RECORD_ROWS)
    executor = made(application.output, max_rows=most, limit_bytes=int(free_bytes * how.graph_memory))
    if application.finish is not None and golden.network is not None:
        between = made(network_output(application.finish), max_rows=len(golden.network), limit_bytes=0)
        golden.check_network(between.predict)

    def one_by_one(inputs: Array) -> Array:
        return np.concatenate([replayed(inputs[row : row + 1]) for row in range(len(inputs))])

    def in_batches(inputs: Array) -> Array:
        rows = executor.max_rows
        return np.concatenate([replayed(inputs[start : start + rows]) for start in range(0, len(inputs), rows)])

    def replayed(inputs: Array) -> Array:
        executor.capture_for(inputs)
        return executor.predict(inputs)

    executor.capture_grid()
    # Each at the edge of its own length bucket, and all together at that of the longest.
    difference = max(golden.check(one_by_one), golden.check(in_batches))
    log.info(
        "%s in %s on %s: the golden examples differ by %.3g, allowed is %.3g",
        application.name,
        how.precision,
        torch.cuda.get_device_name(how.device),
        difference,
        golden.tolerance,
    )
    return Runnable(application=application, files=predictor.files, executor=executor)


def loosened(golden: Golden, precision: str) -> Golden:
    """Return golden examples with the tolerance of a precision."""
    if precision not in TOLERANCES:
        return golden
    return replace(golden, tolerance=max(golden.tolerance, TOLERANCES[precision] * largest_output(golden.outputs)))


def _answers(application: Application, executor: CudaGraphExecutor, inputs: Array) -> Array:
    if application.live is not None:
        return run_in_chunks(executor, inputs)
    rows = len(inputs)
    ones = np.ones(rows, np.int64)
    return executor.step(
        StepInput(slots_B=np.arange(rows), chunk_B=inputs, length_B=ones, fresh_B=ones > 0)
    ).output_B.copy()
