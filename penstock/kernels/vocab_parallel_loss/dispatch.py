"""Dispatch between kernel and reference."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, PRECISIONS, logged, without_triton
from penstock.kernels.vocab_parallel_loss import reference

SUBJECT = "cross-entropy over processes is computed"


def class_sums(logits_NC: Tensor, targets: Tensor) -> Tensor:
    """See `reference.class_sums`."""
    return _chosen_for(logits_NC, targets).class_sums(logits_NC, targets)


def class_gradient(
    logits_NC: Tensor,
    targets: Tensor,
    max_logit_N: Tensor,
    softmax_scale_N: Tensor,
    scale: Tensor,
    smoothing_per_class: float,
    target_weight: float,
) -> Tensor:
    """See `reference.class_gradient`."""
    by = _chosen_for(logits_NC, targets)
    return by.class_gradient(
        logits_NC, targets, max_logit_N, softmax_scale_N, scale, smoothing_per_class, target_weight
    )


def _chosen_for(logits_NC: Tensor, targets: Tensor) -> ModuleType:
    return chosen(logits_NC.device.type, logits_NC.dtype, targets.is_floating_point())


@cache
def chosen(device: str, dtype: torch.dtype, shares: bool) -> ModuleType:
    """Choose the implementation for a device, dtype and kind of targets; logged once."""
    if device != "cuda":
        return logged(reference, SUBJECT, "torch", "the kernels are for GPUs")
    if dtype not in PRECISIONS:
        return logged(reference, SUBJECT, "torch", f"the kernels do not compute in {dtype}")
    if shares:
        return logged(reference, SUBJECT, "torch", "the kernels take labels, not shares of classes")
    if not HAS_TRITON:
        return without_triton(reference, SUBJECT)
    from penstock.kernels.vocab_parallel_loss import triton

    return logged(triton, SUBJECT, "Triton", "one pass over memory forward, one backward")
