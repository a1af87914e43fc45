"""Scaling of images of any size into a frame, with antialiasing."""

from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.nn.resize_rows import resize_rows

# H height, W width of a raw image; F length of the frame along an axis; C channels
# N numbers of a row of pixels, or rows of the picture on its side, one for each channel


@final
class Letterbox(nn.Module):
    """An image scaled to fit a frame, at its top left; the rest of the frame is 0.

    It is resized as by `penstock.nn.resize.SquareResize`, by the same factor in both directions: a pixel `(x, y)` of
    the frame is `(x, y) * max(H / height, W / width)` in the image.

    Args:
        height: Of the frame, in pixels.
        width: Of the frame.

    Raises:
        ApplicationError: A size is not a whole number above 0.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        if any(type(size) is not int or size < 1 for size in (height, width)):
            raise ApplicationError(
                f"Letterbox has height {height!r} and width {width!r}; they must be whole numbers of pixels above 0."
            )
        self.height, self.width = height, width

    def forward(self, raw: Tensor) -> Tensor:
        """Float32 pixels `[3, height, width]` in 0..255 of an image `[H, W, 3]`, or RGBA `[H, W, 4]`, of any dtype.

        The alpha channel is ignored: `decode_image` and an opaque canvas have blended it already.
        """
        height, width, channels = raw.shape
        # Input pixels for each pixel of the frame are `share / whole`, as whole numbers.
        whole = self.height * self.width
        share: Any = torch.sym_max(height * self.width, width * self.height)
        high_FN = resize_rows(raw.reshape(height, -1), length=height, share=share, whole=whole, size=self.height)
        turned_NF = high_FN.t().contiguous()
        wide_N3F = resize_rows(
            turned_NF, length=width, share=share, whole=whole, size=self.width, channels=channels, keep=3
        )
        return wide_N3F.reshape(self.width, 3 * self.height).t().contiguous().reshape(3, self.height, self.width)
