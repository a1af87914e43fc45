"""Many tensors copied into others by one launch, however small they are."""

from penstock.kernels.multi_tensor_copy.dispatch import Copies

__all__ = ["Copies"]
