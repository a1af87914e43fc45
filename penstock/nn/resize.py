"""Centre crop of images of any size to a square, resized with antialiasing."""

from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.nn.resize_rows import resize_rows

# H height, W width of a raw image, M side of its centre square, S side of the result; C channels
# N numbers of a row of pixels, or rows of the picture on its side, one for each channel


@final
class SquareResize(nn.Module):
    """Centre square of an image, resized by bilinear interpolation with antialiasing.

    The result equals `torch.nn.functional.interpolate` with `mode="bilinear"` and `antialias=True`: an output pixel is
    the mean of the nearby input pixels, weighted by a triangle two output pixels wide (two input pixels if the image is
    enlarged). Weights are multiplied in float32, so that every runtime of the exported graph gives the same numbers.
    The result is not rounded, because two runtimes may round the same number differently.

    The smallest image is one pixel; the exported graph takes any height and width too.

    Args:
        size: Side of the result, in pixels.

    Raises:
        ApplicationError: The size is not a whole number above 0.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if type(size) is not int or size < 1:
            raise ApplicationError(f"SquareResize has size {size!r}; it must be a whole number of pixels above 0.")
        self.size = size

    def forward(self, raw: Tensor) -> Tensor:
        """Float32 pixels `[S, S, 3]` in 0..255 of an image `[H, W, 3]`, or RGBA `[H, W, 4]`, in 0..255 of any dtype.

        The alpha channel is ignored: `decode_image` and an opaque canvas have blended it already.
        """
        height, width = raw.shape[0], raw.shape[1]
        side: Any = torch.sym_min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        channels = raw.shape[2]
        # The vertical crop copies no rows: `first`.
        rows_HN = raw[:, left : left + side].reshape(height, -1)
        high_SN = resize_rows(rows_HN, length=side, share=side, whole=self.size, size=self.size, first=top)
        # ONNX Runtime transposes a matrix ten times as fast as it swaps rows and columns of pixels.
        turned_NS = high_SN.t().contiguous()
        wide_N3S = resize_rows(
            turned_NS, length=side, share=side, whole=self.size, size=self.size, channels=channels, keep=3
        )
        return wide_N3S.t().contiguous().reshape(self.size, self.size, 3)
