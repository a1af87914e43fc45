"""Streaming convolutions over time, causal or with a bounded lookahead."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.nn.windows import Windowed, Windows

# B batch, T frames in, U frames out, C channels, F bins of a frame


@final
class CausalConv1d(Windowed):
    """Causal convolution over time.

    The sequence is padded with `kernel - stride` zeros at its start, so that there is an output for every `stride`
    frames.

    Args:
        channels_in: Features of a frame.
        channels_out: Features of an output.
        kernel: Input frames of an output.
        stride: Frames from one output to the next, at most `kernel`.
        groups: See `torch.nn.Conv1d`.
        bias: Add a learned bias.

    Raises:
        ApplicationError: The stride is longer than the kernel.
    """

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = True
    ) -> None:
        super().__init__(Windows(kernel, stride, before=kernel - stride))
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, stride, groups=groups, bias=bias)

    def empty(self, batch: int) -> Tensor:
        """`[B, channels_in]`."""
        return self.conv.weight.new_zeros(batch, self.conv.in_channels)

    def over(self, frames_BM: Tensor) -> Tensor:
        """`[B, M, channels_in]` to `[B, U, channels_out]`."""
        return self.conv(frames_BM.transpose(1, 2)).transpose(1, 2)

    def over_chunk(self, frames_BM: Tensor) -> Tensor:
        """As `over`, by a matrix product where the channels are not grouped."""
        if self.conv.groups > 1:
            return self.over(frames_BM)
        # For few frames of many streams cuDNN's convolution took 18 ms on an H200, a matrix product less than 1 ms.
        windows_BUX = self.windows.each(frames_BM).flatten(2)
        return functional.linear(windows_BUX, self.conv.weight.flatten(1), self.conv.bias)


@final
class CausalConv2d(Windowed):
    """Convolution over time and the bins of each frame, causal in time, centred over the bins.

    Amodei et al. 2015, "Deep Speech 2", section 3.5, without the future context.

    Args:
        channels_in: Channels of an input bin.
        channels_out: Channels of an output bin.
        kernel: Input frames and bins of an output; the number of bins is odd.
        stride: Frames and bins from one output to the next.
        bins: Bins of an input frame.
        bias: Add a learned bias.

    Raises:
        ApplicationError: The stride is longer than the kernel, or the kernel has an even number of bins.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        *,
        bins: int,
        bias: bool = True,
    ) -> None:
        if kernel[1] % 2 == 0:
            raise ApplicationError(f"CausalConv2d has a kernel of {kernel[1]} bins; give it an odd number.")
        super().__init__(Windows(kernel[0], stride[0], before=kernel[0] - stride[0]))
        self.bins = bins
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=(0, kernel[1] // 2), bias=bias)

    @property
    def output_bins(self) -> int:
        """Bins of an output frame."""
        return (self.bins - 1) // self.conv.stride[1] + 1

    def empty(self, batch: int) -> Tensor:
        """`[B, channels_in, F]`."""
        return self.conv.weight.new_zeros(batch, self.conv.in_channels, self.bins)

    def over(self, frames_BM: Tensor) -> Tensor:
        """`[B, M, channels_in, F]` to `[B, U, channels_out, output_bins]`."""
        return self.conv(frames_BM.transpose(1, 2)).transpose(1, 2)


@final
class Lookahead(Windowed):
    """Depthwise convolution over a frame and the next `future` frames.

    It gives a unidirectional network a bounded lookahead. Outputs are delayed by `future` frames; the end of a stream
    is padded with zeros and returns the last ones.

    Wang et al. 2016, "Lookahead Convolution Layer for Unidirectional Recurrent Neural Networks", section 3.

    Args:
        features: Features of a frame.
        future: Future frames of an output.
    """

    def __init__(self, features: int, future: int) -> None:
        super().__init__(Windows(future + 1, after=future))
        self.weight = nn.Parameter(torch.empty(features, 1, future + 1))
        nn.init.uniform_(self.weight, -((future + 1) ** -0.5), (future + 1) ** -0.5)

    def empty(self, batch: int) -> Tensor:
        """`[B, features]`."""
        return self.weight.new_zeros(batch, self.weight.shape[0])

    def over(self, frames_BM: Tensor) -> Tensor:
        """`[B, M, features]` to `[B, U, features]`."""
        return functional.conv1d(frames_BM.transpose(1, 2), self.weight, groups=self.weight.shape[0]).transpose(1, 2)
