"""Dispatch between the kernels and torch's layer, which cuDNN runs on a GPU."""

import os
from functools import cache

import torch
from torch import Tensor, nn

from penstock.kernels.common import HAS_TRITON, NO_TRITON, log_kernel
from penstock.kernels.gru_layer.operations import ROWS, UNITS, persistent_gru

# To compare with cuDNN.
ENABLED = os.environ.get("PENSTOCK_GRU_KERNELS", "1") == "1"
PRECISIONS = (torch.bfloat16, torch.float16)
# Measured to be faster than cuDNN. With 1,024 units, a program's weights do not fit into shared memory.
HIDDEN = 512
# Of Hopper, where the kernels were measured.
CAPABILITY = (9, 0)
# Offsets within the rows of a program are int32.
MOST_FRAMES = 32_768


def gru_layer(x_BTF: Tensor, cell: nn.GRU) -> Tensor:
    """See `reference.gru_layer`.

    Args:
        x_BTF: Frames.
        cell: Torch's layer, unidirectional, with biases and the batch first. It runs where the kernels do not.
    """
    if not ENABLED:
        return cell(x_BTF)[0]
    # Export needs torch's own layer. Without gradients, cuDNN keeps nothing for a backward pass.
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return cell(x_BTF)[0]
    dtype, capability, multiprocessors = x_BTF.dtype, None, 0
    if x_BTF.is_cuda:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        device = torch.cuda.get_device_properties(x_BTF.device)
        capability, multiprocessors = (device.major, device.minor), device.multi_processor_count
    why = why_not(capability, multiprocessors, dtype, cell.hidden_size, *x_BTF.shape[:2])
    # torch.compile cannot trace a logger.
    if not torch.compiler.is_compiling():
        _say(why)
    return cell(x_BTF)[0] if why else persistent_gru(x_BTF, dtype, *cell.all_weights[0])


def why_not(
    capability: tuple[int, int] | None, multiprocessors: int, dtype: torch.dtype, hidden: int, rows: int, frames: int
) -> str:
    """Return the reason for which torch's layer runs, or an empty string.

    Args:
        capability: Compute capability of the GPU, None for another device.
        multiprocessors: Multiprocessors of the GPU, each of which runs one program.
        dtype: Dtype of the layer's arithmetic, autocast included.
        hidden: Hidden units.
        rows: Sequences of the batch.
        frames: Frames of a sequence.
    """
    if capability is None:
        return "the kernels are for GPUs"
    if dtype not in PRECISIONS:
        return f"the kernels compute in bf16 or fp16, not in {dtype}"
    if capability != CAPABILITY:
        return f"the kernels are for compute capability 9.0, not {capability[0]}.{capability[1]}"
    if hidden != HIDDEN:
        return f"the kernels were measured with {HIDDEN} hidden units, not with {hidden:,}"
    most_rows = multiprocessors // (HIDDEN // UNITS) * ROWS
    if not 0 < rows <= most_rows:
        return f"the kernels take 1 to {most_rows:,} rows on {multiprocessors} multiprocessors, not {rows:,}"
    if frames > MOST_FRAMES:
        return f"the kernels take up to {MOST_FRAMES:,} frames, not {frames:,}"
    return "" if HAS_TRITON else NO_TRITON


@cache
def _say(why: str) -> None:
    log_kernel("GRU layers are trained by", "one launch for all frames, forward and backward", why)
