"""Reference implementation in plain torch."""

import torch.nn.functional as F
from torch import Tensor

# B batch, C channels, H height, W width


def max_pool(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Maximum of each window, `[B, C, (H + 2 padding - kernel) // stride + 1, ...]`.

    Args:
        x_BCHW: Images.
        kernel: Side of a window, in pixels.
        stride: Pixels from one window to the next.
        padding: Pixels of padding on each side; at most half a kernel.
    """
    return F.max_pool2d(x_BCHW, kernel, stride, padding)
