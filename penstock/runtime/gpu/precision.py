"""Precisions of networks on a GPU, by autocast's rules, and the tolerances with which they are accepted."""

import copy
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.core.bundles.golden import Golden, largest_output
from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Tolerance of a precision, relative to the largest golden output. Rounding errors are 2**-8 in bf16 and 2**-11 in fp16
# and tf32, and accumulate over the layers of a network.
TOLERANCES = {"bf16": 0.05, "fp16": 0.01, "tf32": 0.01}
# Tried by `auto`, the most accurate first. Without fp16: numbers beyond 65,504 overflow, and golden examples do not
# show which inputs have them.
AUTO = ("fp32", "tf32", "bf16")
# Flags of CUDA's libraries, the capture of a graph and Inductor's loader are the whole process's, in which one thread
# may serve while others load and compile.
ONE_AT_A_TIME = threading.RLock()
# The fastest first.
WEIGHTS = ("all", "products")

# Layers whose products autocast computes in the reduced precision whatever the dtype of their weights is.
_PRODUCTS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage]
_BATCH_NORM: Any = nn.modules.batchnorm._NormBase  # pyright: ignore[reportPrivateUsage]
_NORMS = (_BATCH_NORM, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWay(JsonRecord):
    """A way to run a network on a GPU.

    Args:
        precision: `"fp32"`, `"tf32"`, `"bf16"` or `"fp16"`.
        weights: In bf16 and fp16, the weights that are kept in that precision: `"all"` but those of normalization
            layers, or those of `"products"` alone, which gives exactly the numbers of autocast.
        channels_last: Convolutions work on channels-last memory.

    Raises:
        ApplicationError: There is no such precision.
    """

    unreadable = "the way to run a network is not readable ({}); remove the file."
    precision: str
    weights: str = "all"
    channels_last: bool = False

    def __post_init__(self) -> None:
        known = ("fp32", *sorted(TOLERANCES))
        if self.precision not in known:
            raise ApplicationError(f"the precision is {self.precision!r}; it must be one of {', '.join(known)}.")
        if self.weights not in WEIGHTS:
            raise ApplicationError(f"the weights are {self.weights!r}; they must be one of {', '.join(WEIGHTS)}.")

    def __str__(self) -> str:
        kept = ", by autocast with fp32 weights" if self.weights == "products" else ""
        return self.precision + kept + (", channels last" if self.channels_last else "")


def ways_of(precision: str) -> list[GpuWay]:
    """List the ways to run a network in a precision, the fastest first."""
    if precision not in DTYPES:
        return [GpuWay(precision=precision)]
    return [GpuWay(precision=precision, weights=weights) for weights in WEIGHTS]


def reduced(module: nn.Module, way: GpuWay) -> nn.Module:
    """Copy a network and convert the weights that it need not have in float32; to be run under `computing`."""
    own = copy.deepcopy(module).eval().requires_grad_(False)
    dtype = DTYPES.get(way.precision)
    if dtype is not None:
        # By identity, because layers may share a weight.
        users: dict[int, tuple[nn.Parameter, list[nn.Module]]] = {}
        for layer in own.modules():
            for parameter in layer.parameters(recurse=False):
                users.setdefault(id(parameter), (parameter, []))[1].append(layer)
        for parameter, layers in users.values():
            if parameter.is_floating_point() and _is_reduced(layers, way):
                parameter.data = parameter.data.to(dtype)
    if way.channels_last:
        for layer in own.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return own


def _is_reduced(layers: list[nn.Module], way: GpuWay) -> bool:
    if way.weights == "products":
        return all(isinstance(layer, _PRODUCTS) for layer in layers)
    return not any(isinstance(layer, _NORMS) for layer in layers)


@contextmanager
def libraries_in(precision: str, *, tuned: bool = False) -> Generator[None]:
    """Let CUDA's libraries compute in a precision, while no other thread runs a network outside of its graphs.

    The flags are not restored: each network sets them before it runs.

    Args:
        precision: Products in float32 round to tf32 in all but fp32.
        tuned: cuDNN measures its algorithms, which takes seconds for each new shape, and takes the fastest.
    """
    with ONE_AT_A_TIME:
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        # Not `cuda.matmul.allow_tf32`, after which torch may find its settings contradictory, and raise.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.benchmark = tuned
        yield


@contextmanager
def computing(precision: str, device: str) -> Generator[None]:
    """Compute in a precision, one thread at a time.

    Args:
        precision: As in `GpuWay`.
        device: Type of the device.
    """
    dtype = DTYPES.get(precision)
    # A cache of converted weights would outlive the graph that holds them.
    with libraries_in(precision), torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
        yield


def loosened(golden: Golden, precision: str) -> Golden:
    """Return golden examples with the tolerance of a precision."""
    if precision not in TOLERANCES:
        return golden
    return replace(golden, tolerance=max(golden.tolerance, TOLERANCES[precision] * largest_output(golden.outputs)))
