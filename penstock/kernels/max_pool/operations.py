"""The kernels as torch operations, which the compiler treats as opaque and differentiable."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("penstock::max_pool", mutates_args=())
def pooled(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Compute the maxima, channels last, and their positions within their windows."""
    # Imported here, because Triton is not installed on machines without a GPU.
    from penstock.kernels.max_pool import triton

    x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    out_BCHW, place_BCHW = _empty(x_BCHW, kernel, stride, padding)
    triton.pool(x_BCHW, out_BCHW, place_BCHW, kernel, stride, padding)
    return out_BCHW, place_BCHW


@pooled.register_fake
def _empty(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x_BCHW.shape
    shape = batch, channels, *((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    return _channels_last(shape, x_BCHW, x_BCHW.dtype), _channels_last(shape, x_BCHW, torch.int8)


@torch.library.custom_op("penstock::max_pool_backward", mutates_args=())
def _spread(
    grad_BCHW: Tensor, place_BCHW: Tensor, height: int, width: int, kernel: int, stride: int, padding: int
) -> Tensor:
    from penstock.kernels.max_pool import triton

    grad_BCHW = grad_BCHW.contiguous(memory_format=torch.channels_last)
    out_BCHW = _empty_before(grad_BCHW, place_BCHW, height, width, kernel, stride, padding)
    triton.spread(grad_BCHW, place_BCHW, out_BCHW, kernel, stride, padding)
    return out_BCHW


@_spread.register_fake
def _empty_before(
    grad_BCHW: Tensor, place_BCHW: Tensor, height: int, width: int, kernel: int, stride: int, padding: int
) -> Tensor:
    return _channels_last((*grad_BCHW.shape[:2], height, width), grad_BCHW, grad_BCHW.dtype)


def _channels_last(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_BCHW, *ctx.sides = inputs
    ctx.height, ctx.width = x_BCHW.shape[2:]
    ctx.save_for_backward(output[1])


def _before(ctx: Any, grad_BCHW: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (place_BCHW,) = ctx.saved_tensors
    return _spread(grad_BCHW, place_BCHW, ctx.height, ctx.width, *ctx.sides), None, None, None


pooled.register_autograd(_before, setup_context=_keep)
