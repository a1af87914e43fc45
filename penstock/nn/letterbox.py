"""Scaling of images of any size into a frame, with antialiasing."""

from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# H height, W width of a raw image; F length of the frame along an axis; C channels
# N numbers in a row of pixels, G groups of output rows, R rows of a group, L input rows of a group

# See `penstock.nn.resize`.
ROWS = 8


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
        high_FN = self._rows(raw.reshape(height, -1), height, share, whole, self.height)
        turned_WN = high_FN.reshape(self.height, -1, channels).transpose(0, 1).reshape(-1, self.height * channels)
        wide_FN = self._rows(turned_WN, width, share, whole, self.width)
        return wide_FN.reshape(self.width, self.height, channels)[..., :3].permute(2, 1, 0).contiguous()

    def _rows(self, picture_LN: Tensor, length: Any, share: Any, whole: int, size: int) -> Tensor:
        """Resize the rows of a picture to `[size, N]`."""
        rows = min(ROWS, size)
        groups = -(-size // rows)
        reach: Any = torch.sym_max(share, whole)
        # Number of input rows that a group can need.
        taken: Any = torch.sym_min(((rows - 1) * share + 2 * reach) // whole + 2, length)
        centre_F = (torch.arange(groups * rows, dtype=torch.float64) + 0.5) * share / whole
        centre_GR = centre_F.reshape(groups, rows)
        start_G = (centre_GR[:, 0] - reach / whole - 0.5).floor().to(torch.int64).clamp(min=0)
        start_G = torch.minimum(start_G, torch.full((), length, dtype=torch.int64) - taken)
        at_GL = start_G[:, None] + torch.arange(taken)
        away_GRL = (at_GL[:, None] + 0.5 - centre_GR[:, :, None]).abs() * whole / reach
        weight_GRL = (1 - away_GRL).clamp(min=0)
        weight_GRL = weight_GRL / weight_GRL.sum(2, keepdim=True).clamp(min=1e-9)
        # Beyond the image the frame is empty.
        weight_GRL = weight_GRL * (centre_GR < length)[:, :, None]
        made = [
            weight_RL @ picture_LN.index_select(0, at_L).float()
            for weight_RL, at_L in zip(weight_GRL.float().unbind(), at_GL.unbind(), strict=True)
        ]
        return torch.cat(made)[:size]
