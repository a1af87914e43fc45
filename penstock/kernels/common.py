"""Definitions that all kernels share."""

import logging
from importlib.util import find_spec
from typing import TypeVar

import torch

# Evaluated here, because torch.compile of 2.11 cannot trace it.
HAS_TRITON = find_spec("triton") is not None
# The dtypes that kernels read and write.
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)

NO_TRITON = "the package triton is not installed; pip install 'penstock-nn[gpu]'"

Chosen = TypeVar("Chosen")
log = logging.getLogger(__name__)


def logged(implementation: Chosen, subject: str, by: str, why: str) -> Chosen:
    """Log the choice of an implementation with its reason, and return it."""
    log.info("%s by %s: %s", subject, by, why)
    return implementation


def log_kernel(subject: str, kernel: str, why_not: str) -> None:
    """Log what runs an operation: a kernel of Triton, or torch with the reason; a warning for lack of Triton.

    Args:
        subject: The operation and its preposition.
        kernel: What the kernel has over torch.
        why_not: Why torch runs it; empty where the kernel does.
    """
    by = f"torch: {why_not}" if why_not else f"Triton: {kernel}"
    log.log(logging.WARNING if why_not == NO_TRITON else logging.INFO, "%s %s", subject, by)


def without_triton(implementation: Chosen, subject: str) -> Chosen:
    """Warn that torch runs an operation on a GPU for lack of Triton, and return its implementation."""
    log.warning("%s by torch, often slower: %s", subject, NO_TRITON)
    return implementation
