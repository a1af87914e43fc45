"""A bundle made runnable on a GPU, in a precision that is checked against the recorded answers."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from penstock.core.application import Application
from penstock.core.errors import ApplicationError, ServeError
from penstock.core.golden import Golden
from penstock.core.spec import Array
from penstock.runtime.executor import Batch
from penstock.runtime.graphed_executor import GraphedExecutor
from penstock.runtime.load import Predictor, load, streaming_of
from penstock.runtime.state_table import affordable_slots
from penstock.runtime.streamed import streamed

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# How far from the recorded answers a reduced precision may be, as a share of the largest of them. What remains of a
# number is 2**-8 of it in bf16 and 2**-11 in fp16, and a network of some depth adds up a few of those.
ALLOWED = {"bf16": 0.05, "fp16": 0.01}
MOST_ROWS = 4096
# The one batch size where answers are exact.
EXACT_ROWS = 256


def gpu_executor(
    bundle: Path,
    *,
    app: str | None,
    accept_changed: bool,
    device: str,
    precision: str,
    slots: int,
    max_rows: int | None = None,
    exact: bool = False,
    sharing: int = 1,
) -> tuple[Predictor, GraphedExecutor, int]:
    """Verify a bundle on the CPU and on the GPU, and give what runs it there.

    Args:
        bundle: Its folder.
        app: Where the application is now, if it moved.
        accept_changed: Take an application whose sources changed, as long as the golden examples agree.
        device: `"cuda"` or `"cuda:N"`.
        precision: `"fp32"`, `"bf16"` or `"fp16"`.
        slots: How many streams or requests there may be.
        max_rows: A limit of the batch; None for no other than the GPU's.
        exact: Fill every batch up to one size, see `StreamingExecutor`.
        sharing: Engines on this GPU, of whose free memory each has its part.

    Returns:
        The bundle, what runs it, and how many slots its memory has room for.

    Raises:
        BundleError: The bundle is damaged, its application changed, or its answers did, or differ too much there.
        ApplicationError: The network cannot be run by CUDA graphs.
        ServeError: There is no such GPU, or its memory has no room.
    """
    if not torch.cuda.is_available():
        raise ServeError(f"--device is {device}, but this torch sees no GPU; leave it out, or mend the driver.")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ServeError(f"--device is {device}, but there are {torch.cuda.device_count()} GPUs, from cuda:0 on.")
    # fp32 means it: by default cuDNN's convolutions round to ten bits.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    predictor = load(bundle, app=app, accept_changed=accept_changed)
    golden = _widened(predictor.files.golden, precision)
    specs = predictor.application.input, predictor.application.output
    dtype = None if precision == "fp32" else DTYPES[precision]
    module = streaming_of(predictor.application, predictor.module)
    rows = len(golden.inputs)
    try:
        checked = GraphedExecutor(module, *specs, slots=rows, max_rows=rows, device=device, dtype=dtype)
        difference = golden.check(lambda inputs: _answers(predictor.application, checked, inputs))
    except (RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        raise ApplicationError(
            f"the network of {predictor.application.name!r} cannot be run in {precision} by CUDA graphs ({cause}); "
            f"serve it with --device cpu."
        ) from error
    log.info(
        "%s in %s on %s: the golden examples differ by %.3g, allowed is %.3g",
        predictor.application.name,
        precision,
        torch.cuda.get_device_name(device),
        difference,
        golden.tolerance,
    )
    most = EXACT_ROWS if exact else min(max_rows or MOST_ROWS, MOST_ROWS)
    slots = affordable_slots(module, slots, torch.cuda.mem_get_info(device)[0] // sharing)
    executor = GraphedExecutor(module, *specs, slots=slots, max_rows=most, device=device, dtype=dtype, exact=exact)
    return predictor, executor, slots


def _widened(golden: Golden, precision: str) -> Golden:
    if precision not in ALLOWED:
        return golden
    largest = float(np.abs(golden.outputs.astype(np.float64)).max())
    return replace(golden, tolerance=max(golden.tolerance, ALLOWED[precision] * largest))


def _answers(application: Application, executor: GraphedExecutor, inputs: Array) -> Array:
    if application.live is not None:
        return streamed(executor, inputs)
    rows = len(inputs)
    ones = np.ones(rows, np.int64)
    return executor.step(
        Batch(slots_B=np.arange(rows), chunk_B=inputs, length_B=ones, fresh_B=ones > 0)
    ).output_B.copy()
