"""Fused optimizer step over many weights, which also writes their low-precision compute copies."""

from penstock.kernels.fused_optimizer.dispatch import Weights
from penstock.kernels.fused_optimizer.rules import Adam, Sgd

__all__ = ["Adam", "Sgd", "Weights"]
