"""Streaming convolutions over time, causal or with a bounded lookahead."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.nn.streaming import State, Step, Streaming
from penstock.nn.windows import Windows

# B batch, T frames in, U frames out, C channels, F bins of a frame


@final
class CausalConv1d(Streaming):
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
        super().__init__()
        self.windows = Windows(kernel, stride, before=kernel - stride)
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, stride, groups=groups, bias=bias)

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, channels_in]` to `[B, U, channels_out]`."""
        return self.windows.over(whole_BT, length_B, self._over)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """One for every `stride` frames."""
        return self.windows.count(length_B)

    def initial_state(self, batch: int) -> State:
        """The zeros before the first frame."""
        return self.windows.initial_state(self.conv.weight.new_zeros(batch, self.conv.in_channels))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        ready = self.windows.take(chunk_BT, length_B, state, last_B)
        over = self._over if self.conv.groups > 1 else self._product
        return Step(over(ready.frames_BM), ready.windows_B, ready.state)

    def _over(self, frames_BM: Tensor) -> Tensor:
        return self.conv(frames_BM.transpose(1, 2)).transpose(1, 2)

    def _product(self, frames_BM: Tensor) -> Tensor:
        # For few frames of many streams cuDNN's convolution took 18 ms on an H200, a matrix product less than 1 ms.
        windows_BUX = self.windows.each(frames_BM).flatten(2)
        return functional.linear(windows_BUX, self.conv.weight.flatten(1), self.conv.bias)


@final
class CausalConv2d(Streaming):
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
        super().__init__()
        if kernel[1] % 2 == 0:
            raise ApplicationError(f"CausalConv2d has a kernel of {kernel[1]} bins; give it an odd number.")
        self.windows = Windows(kernel[0], stride[0], before=kernel[0] - stride[0])
        self.bins = bins
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=(0, kernel[1] // 2), bias=bias)

    @property
    def output_bins(self) -> int:
        """Bins of an output frame."""
        return (self.bins - 1) // self.conv.stride[1] + 1

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, channels_in, F]` to `[B, U, channels_out, output_bins]`."""
        return self.windows.over(whole_BT, length_B, self._over)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """One for every `stride` frames."""
        return self.windows.count(length_B)

    def initial_state(self, batch: int) -> State:
        """The zeros before the first frame."""
        return self.windows.initial_state(self.conv.weight.new_zeros(batch, self.conv.in_channels, self.bins))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        ready = self.windows.take(chunk_BT, length_B, state, last_B)
        return Step(self._over(ready.frames_BM), ready.windows_B, ready.state)

    def _over(self, frames_BM: Tensor) -> Tensor:
        return self.conv(frames_BM.transpose(1, 2)).transpose(1, 2)


@final
class Lookahead(Streaming):
    """Depthwise convolution over a frame and the next `future` frames.

    It gives a unidirectional network a bounded lookahead. Outputs are delayed by `future` frames; the end of a stream
    is padded with zeros and returns the last ones.

    Wang et al. 2016, "Lookahead Convolution Layer for Unidirectional Recurrent Neural Networks", section 3.

    Args:
        features: Features of a frame.
        future: Future frames of an output.
    """

    def __init__(self, features: int, future: int) -> None:
        super().__init__()
        self.windows = Windows(future + 1, after=future)
        self.weight = nn.Parameter(torch.empty(features, 1, future + 1))
        nn.init.uniform_(self.weight, -((future + 1) ** -0.5), (future + 1) ** -0.5)

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to the same shape."""
        return self.windows.over(whole_BT, length_B, self._over)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """The input lengths."""
        return length_B

    def initial_state(self, batch: int) -> State:
        """No waiting frames."""
        return self.windows.initial_state(self.weight.new_zeros(batch, self.weight.shape[0]))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`; a stream's last step also returns the delayed outputs."""
        ready = self.windows.take(chunk_BT, length_B, state, last_B)
        return Step(self._over(ready.frames_BM), ready.windows_B, ready.state)

    def _over(self, frames_BM: Tensor) -> Tensor:
        return functional.conv1d(frames_BM.transpose(1, 2), self.weight, groups=self.weight.shape[0]).transpose(1, 2)
