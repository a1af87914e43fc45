"""Max pooling whose gradient takes one pass over memory on a GPU."""

from typing import final

from torch import Tensor, nn

from penstock.kernels.max_pool import max_pool


@final
class MaxPool2d(nn.MaxPool2d):
    """As `torch.nn.MaxPool2d`; windows that overlap by a kernel of its own on a GPU, see `penstock.kernels.max_pool`.

    Of rectified numbers the largest is the rectified largest: put the `ReLU` behind it, where there is less to rectify.

    Args:
        kernel: The windows' side.
        stride: From one window to the next; the kernel by default.
        padding: How far windows reach beyond each side.
    """

    def __init__(self, kernel: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(kernel, stride, padding)
        self._sides = kernel, stride or kernel, padding

    def forward(self, input: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C, (H + 2 padding - kernel) // stride + 1, ...]`."""
        return max_pool(input, *self._sides)
