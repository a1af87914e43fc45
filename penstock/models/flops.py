"""How much arithmetic a network takes, for the share of a device's peak that a run reaches."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Multiplications and additions a second of dense products by precision, from NVIDIA's data sheets; names as the driver
# has them, the longer ones first. Numbers of 10 bits behind the point are multiplied in tf32, fp16 as fast as bf16.
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
    """The most that a device can multiply and add a second.

    Args:
        device: Its name, as torch gives it.
        precision: `"fp32"`, `"tf32"`, `"bf16"` or `"fp16"`.

    Returns:
        Of dense products, or None for a device whose peak is not known here.
    """
    peaks = next((peaks for name, peaks in PEAK_FLOPS.items() if name in device), None)
    return None if peaks is None else peaks.get("bf16" if precision == "fp16" else precision)


def flops(network: nn.Module, raw_B: Tensor, *, backward: bool = False) -> int:
    """Multiplications and additions in the products of one pass over a batch (a multiply-add counts as two).

    Nothing is computed: shapes alone go through the network. Products are convolutions, matrix products and attention;
    what is done number by number is not counted, as is usual. A recurrent network's are those of all its frames.

    Args:
        network: As it is trained; it is neither changed nor run.
        raw_B: A batch of raw inputs, of which only shape and dtype matter.
        backward: Count the gradients of the parameters too, about twice as much again.
    """
    empty = deepcopy(network).to("meta").train(backward)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = empty(raw_B.to("meta"))
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops()
