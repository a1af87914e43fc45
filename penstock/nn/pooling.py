"""Max pooling whose gradient takes one pass over memory on a GPU."""

from typing import final

from torch import Tensor, nn

from penstock.kernels.max_pool import max_pool


@final
class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` with its own GPU kernel for overlapping windows, see `penstock.kernels.max_pool`.

    Max pooling and `ReLU` commute: put the `ReLU` after the pooling, where the tensor is smaller.

    Args:
        kernel: Side of a window, in pixels.
        stride: Pixels from one window to the next; the kernel by default.
        padding: Pixels of padding on each side.
    """

    def __init__(self, kernel: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(kernel, stride, padding)
        self._sides = kernel, stride or kernel, padding

    def forward(self, input: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C, (H + 2 padding - kernel) // stride + 1, ...]`."""
        return max_pool(input, *self._sides)
