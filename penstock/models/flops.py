"""FLOP count of a network and peak FLOPs of devices, for MFU."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

# Dense FLOPs a second by precision, from NVIDIA's data sheets, by parts of the driver's device names, the longer ones
# first. fp16 is as fast as bf16.
_SXM_HOPPER = {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12}
_NVL_HOPPER = {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12}
PEAK_FLOPS = {
    "H200 NVL": _NVL_HOPPER,
    "H200": _SXM_HOPPER,
    "H100 NVL": _NVL_HOPPER,
    "H100 PCIe": {"fp32": 51e12, "tf32": 378e12, "bf16": 756e12},
    "H100": _SXM_HOPPER,
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak FLOPs a second of a device.

    Args:
        device: Device name, as torch gives it.
        precision: `"fp32"`, `"tf32"`, `"bf16"` or `"fp16"`.

    Returns:
        The peak of dense products, or None if it is unknown.
    """
    peaks = next((peaks for name, peaks in PEAK_FLOPS.items() if name in device), None)
    return None if peaks is None else peaks.get("bf16" if precision == "fp16" else precision)


def flops(
    network: nn.Module,
    raw_B: Any,
    *,
    backward: bool = False,
    call: Callable[[Any, Any], Any] = lambda network, raw_B: network(raw_B),
) -> int:
    """Count the FLOPs of one pass over a batch (a multiply-add counts as two).

    The pass runs on the meta device, on shapes alone. It counts convolutions, matrix products and attention, in all
    frames of a recurrent network, but no elementwise operations, as is usual.

    Args:
        network: The network, as it is trained; it is neither changed nor run.
        raw_B: A batch of raw inputs, a tensor or a tree of tensors; only shape and dtype matter.
        backward: Count the backward pass too, about twice as much again.
        call: Calls the network with the inputs.
    """
    empty = deepcopy(network).to("meta").train(backward)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = call(empty, tree_map(lambda tensor: tensor.to("meta"), raw_B))
        if backward:
            found = [each.sum() for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
            torch.stack(found).sum().backward()
    return counter.get_total_flops()
