"""First convolution of an image network: few channels and a large stride."""

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# B batch, C channels, H height, W width


@final
class EntryConv2d(nn.Conv2d):
    """Convolution with few input channels and a stride above 1, computed on a GPU by space-to-depth.

    Tensor cores multiply eight channels or more at once. With an image's three, the input is copied to pad it with zero
    channels, and most products are with zeros. A stride of s over C channels equals a stride of 1 over blocks of s x s
    pixels with C s s channels, with the kernel padded to whole blocks (as in the MLPerf Training entries for ResNet-50
    since 2019). Parameters, names and results are those of `torch.nn.Conv2d`, up to the order of summation; on other
    devices it is `torch.nn.Conv2d`.

    Args:
        channels_in: C.
        channels_out: Output channels.
        kernel: Side of the kernel.
        stride: s, above 1.
        padding: Zeros on each side.
        bias: Add a learned bias.

    Raises:
        ApplicationError: The stride is 1, which gains nothing.
    """

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, *, stride: int, padding: int = 0, bias: bool = True
    ) -> None:
        if stride < 2:
            raise ApplicationError(f"EntryConv2d has a stride of {stride}; use torch.nn.Conv2d for one below 2.")
        super().__init__(channels_in, channels_out, kernel, stride=stride, padding=padding, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, channels_out, (H + 2 padding - kernel) // s + 1, ...]`."""
        return self.by_blocks(input) if input.is_cuda else super().forward(input)

    def by_blocks(self, x_BCHW: Tensor) -> Tensor:
        """Compute the convolution by blocks of s x s pixels, on any device."""
        kernel, stride, padding = self.kernel_size[0], self.stride[0], int(self.padding[0])
        blocks = -(-kernel // stride)
        ends: list[int] = []
        for side in (x_BCHW.shape[3], x_BCHW.shape[2]):
            steps = (side + 2 * padding - kernel) // stride
            # Pad to the end of the last window; a negative number crops pixels that no window covers.
            ends += [padding, (steps + blocks) * stride - side - padding]
        missing = blocks * stride - kernel
        filled: Any = F.pad(self.weight, (0, missing, 0, missing))
        return F.conv2d(
            F.pixel_unshuffle(F.pad(x_BCHW, ends), stride), F.pixel_unshuffle(filled, stride), self.bias, stride=1
        )
