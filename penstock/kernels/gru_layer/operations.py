"""The kernels as torch operations, which the compiler treats as opaque and differentiable."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# B rows, T frames, F features, H hidden units, G the three gates of all units: reset, update, new.
# S is what the backward pass needs of all units: reset, update, new, and the recurrent part of new.

# Rows of a group of programs, and hidden units of a program: the smallest tiles of Hopper's matrix products, rounded up
# to a power of two.
ROWS = 16
UNITS = 64


def persistent_gru(
    x_BTF: Tensor,
    dtype: torch.dtype,
    input_weight_GF: Tensor,
    recurrent_weight_GH: Tensor,
    input_bias_G: Tensor,
    recurrent_bias_G: Tensor,
) -> Tensor:
    """As the reference, computed in `dtype` with float32 sums."""
    input_BTG = functional.linear(x_BTF.to(dtype), input_weight_GF.to(dtype))
    # The kernels add the biases, and sum their gradients in float32.
    return _forward(input_BTG, recurrent_weight_GH.to(dtype), input_bias_G.float(), recurrent_bias_G.float())[0]


@torch.library.custom_op("penstock::gru_layer", mutates_args=())
def _forward(
    input_BTG: Tensor, weight_GH: Tensor, input_bias_G: Tensor, recurrent_bias_G: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the hidden states of all frames, and what the backward pass needs."""
    # Imported here, because Triton is not installed on machines without a GPU.
    from penstock.kernels.gru_layer import triton

    return triton.forward(input_BTG.contiguous(), weight_GH.contiguous(), input_bias_G, recurrent_bias_G)


@_forward.register_fake
def _empty(
    input_BTG: Tensor, weight_GH: Tensor, input_bias_G: Tensor, recurrent_bias_G: Tensor
) -> tuple[Tensor, Tensor]:
    rows, frames, _ = input_BTG.shape
    hidden = weight_GH.shape[1]
    return input_BTG.new_empty(rows, frames, hidden), input_BTG.new_empty(rows, frames, 4 * hidden)


@torch.library.custom_op("penstock::gru_layer_backward", mutates_args=())
def _backward(
    grad_BTH: Tensor, hidden_BTH: Tensor, saved_BTS: Tensor, weight_GH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the gates' input parts, of the recurrent weight, and of both biases, `[2, G]`."""
    from penstock.kernels.gru_layer import triton

    input_grad_BTG, recurrent_grad_BTG, bias_grad_2G = triton.backward(
        grad_BTH.contiguous(), hidden_BTH, saved_BTS, weight_GH.contiguous()
    )
    # Each frame's gradient meets the hidden state before it, one row of memory earlier. The first frame has none, and
    # its recurrent gradient is zero.
    gates = recurrent_grad_BTG.shape[2]
    weight_grad_GH = recurrent_grad_BTG.view(-1, gates)[1:].t() @ hidden_BTH.view(-1, hidden_BTH.shape[2])[:-1]
    return input_grad_BTG, weight_grad_GH, bias_grad_2G


@_backward.register_fake
def _empty_before(
    grad_BTH: Tensor, hidden_BTH: Tensor, saved_BTS: Tensor, weight_GH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, frames, hidden = hidden_BTH.shape
    input_grad_BTG = hidden_BTH.new_empty(rows, frames, 3 * hidden)
    return input_grad_BTG, torch.empty_like(weight_GH), hidden_BTH.new_empty((2, 3 * hidden), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, inputs[1])
    ctx.set_materialize_grads(False)


def _before(ctx: Any, grad_BTH: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_BTH is None:
        return None, None, None, None
    input_grad_BTG, weight_grad_GH, bias_grad_2G = _backward(grad_BTH, *ctx.saved_tensors)
    return input_grad_BTG, weight_grad_GH, *bias_grad_2G.unbind()


_forward.register_autograd(_before, setup_context=_keep)
