"""An optimizer's step over many weights at once, which also writes the shorter copies that a network computes with."""

from penstock.kernels.weight_step.dispatch import Weights
from penstock.kernels.weight_step.rules import Adam, Sgd

__all__ = ["Adam", "Sgd", "Weights"]
