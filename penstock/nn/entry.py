"""The first convolution of a network for pictures, which has few channels and takes large steps."""

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# B batch, C channels, H height, W width


@final
class EntryConv2d(nn.Conv2d):
    """A convolution of few channels whose stride is above 1; on a GPU it is done on blocks of pixels.

    Tensor cores multiply eight channels or more at once: with the three of a picture most of what they do is zeros, and
    what is read is copied to make room for those. A stride of s over C channels is a stride of 1 over blocks of s x s
    pixels with C s s channels, of which a kernel filled up to whole blocks gives the same sums (as the entries to
    MLPerf Training have done for ResNet-50 since 2019, "space to depth"). Parameters, names and answers are those of
    `torch.nn.Conv2d`, up to the order in which is added; elsewhere than on a GPU it is that.

    Args:
        channels_in: C.
        channels_out: Those that leave.
        kernel: Its side.
        stride: s, above 1.
        padding: Zeros on each side.
        bias: Whether something is added to each channel.

    Raises:
        ApplicationError: The stride is 1, for which there is nothing to gain.
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
        """The same on any device, on blocks of s x s pixels."""
        kernel, stride, padding = self.kernel_size[0], self.stride[0], int(self.padding[0])
        blocks = -(-kernel // stride)
        ends: list[int] = []
        for side in (x_BCHW.shape[3], x_BCHW.shape[2]):
            steps = (side + 2 * padding - kernel) // stride
            # What the last step reaches; a negative end cuts off what none does.
            ends += [padding, (steps + blocks) * stride - side - padding]
        missing = blocks * stride - kernel
        filled: Any = F.pad(self.weight, (0, missing, 0, missing))
        return F.conv2d(
            F.pixel_unshuffle(F.pad(x_BCHW, ends), stride), F.pixel_unshuffle(filled, stride), self.bias, stride=1
        )
