"""What the kernel computes, in plain torch."""

import torch.nn.functional as F
from torch import Tensor

# B batch, C channels, H height, W width


def max_pool(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """The largest number of each window, `[B, C, (H + 2 padding - kernel) // stride + 1, ...]`.

    Args:
        x_BCHW: Pictures.
        kernel: The windows' side.
        stride: From one window to the next.
        padding: How far windows reach beyond each side; at most half a kernel.
    """
    return F.max_pool2d(x_BCHW, kernel, stride, padding)
