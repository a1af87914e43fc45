"""Many tensors copied into others by one launch, however small they are."""

from penstock.kernels.copy_many.dispatch import Copies

__all__ = ["Copies"]
