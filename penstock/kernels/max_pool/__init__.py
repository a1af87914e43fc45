"""The largest number of every window of a picture, and its gradient in one pass."""

from penstock.kernels.max_pool.dispatch import max_pool

__all__ = ["max_pool"]
