"""Dispatch between kernel and reference."""

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, PRECISIONS
from penstock.kernels.vocab_parallel_loss import reference

log = logging.getLogger(__name__)


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
        return _said(reference, "torch", "the kernels are for GPUs")
    if dtype not in PRECISIONS:
        return _said(reference, "torch", f"the kernels do not compute in {dtype}")
    if shares:
        return _said(reference, "torch", "the kernels take labels, not shares of classes")
    if not HAS_TRITON:
        return _said(reference, "torch", "the package triton is not installed")
    from penstock.kernels.vocab_parallel_loss import triton

    return _said(triton, "Triton", "one pass over memory forward, one backward")


def _said(module: ModuleType, by: str, why: str) -> ModuleType:
    log.info("cross-entropy over processes is computed by %s: %s", by, why)
    return module
