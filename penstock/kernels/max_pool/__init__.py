"""Max pooling of images, forward and backward in one pass over memory each."""

from penstock.kernels.max_pool.dispatch import max_pool

__all__ = ["max_pool"]
