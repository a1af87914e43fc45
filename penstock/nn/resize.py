"""Centre crop of images of any size to a square, resized with antialiasing."""

from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# H height, W width of a raw image, M side of its centre square, S side of the result; C channels
# N numbers in a row of pixels, G groups of output rows, R rows of a group, L input rows of a group

# Output rows per matrix product: fewer copy input rows more often, more multiply with more zeros. Of 4, 8 and 16 it was
# the fastest in WASM; natively 4 was as fast.
ROWS = 8


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
        # `_rows` crops vertically.
        columns_HN = raw[:, left : left + side].reshape(height, -1)
        high_SN = self._rows(columns_HN, side, top)
        high_MN = high_SN.reshape(self.size, -1, channels).transpose(0, 1).reshape(-1, self.size * channels)
        wide_SN = self._rows(high_MN, side, 0)
        return wide_SN.reshape(self.size, self.size, channels)[..., :3].transpose(0, 1).contiguous()

    def _rows(self, picture_HN: Tensor, side: int, first: int) -> Tensor:
        """Resize the `side` rows from `first` on to `[S, N]`."""
        size = self.size
        rows = min(ROWS, size)
        groups = -(-size // rows)
        reach: Any = torch.sym_max(side, size)
        # Number of input rows that a group can need.
        length: Any = torch.sym_min(((rows - 1) * side + 2 * reach) // size + 2, side)
        centre_S = (torch.arange(groups * rows, dtype=torch.float64) + 0.5) * side / size
        centre_GR = centre_S.reshape(groups, rows)
        start_G = (centre_GR[:, 0] - reach / size - 0.5).floor().to(torch.int64).clamp(min=0)
        start_G = torch.minimum(start_G, torch.full((), side, dtype=torch.int64) - length)
        at_GL = start_G[:, None] + torch.arange(length)
        away_GRL = (at_GL[:, None] + 0.5 - centre_GR[:, :, None]).abs() * size / reach
        weight_GRL = (1 - away_GRL).clamp(min=0)
        weight_GRL = weight_GRL / weight_GRL.sum(2, keepdim=True)
        # One group at a time, because all of a large image as floats would take hundreds of megabytes.
        made = [
            weight_RL @ picture_HN.index_select(0, at_L).float()
            for weight_RL, at_L in zip(weight_GRL.float().unbind(), (at_GL + first).unbind(), strict=True)
        ]
        return torch.cat(made)[:size]
