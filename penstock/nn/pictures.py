"""Pictures of any size to one size: the middle square, resized with antialias."""

from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# H height, W width of a raw picture, M the side of its middle square, S that of the result; C channels
# N numbers in a row of pixels, G groups of rows, R rows of a group, L rows of the picture that it is made of

# So many rows of the result are made at once of the rows of the picture that any of them needs: fewer are copied more
# often, and more are multiplied with more zeros. Of 4, 8 and 16 it was the fastest in WASM; natively 4 was as fast.
ROWS = 8


@final
class SquareResize(nn.Module):
    """The middle square of a picture, resized to one size by bilinear interpolation with antialias.

    A pixel of the result is the mean of the picture's pixels around its place, weighted by a triangle that is as wide
    as two pixels of the result, or of the picture where that is smaller than the result: what
    `torch.nn.functional.interpolate` gives with `mode="bilinear"` and `antialias=True`. The weights are made for the
    picture's size and multiplied in float32, so that the numbers are the same wherever the exported graph runs; they
    are not rounded, since two runtimes would round one number to different sides.

    It takes pictures of one pixel on; the exported graph takes any height and width as well.

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
        """Float32 pixels `[S, S, 3]` in 0..255 of a picture `[H, W, 3]`, or RGBA `[H, W, 4]`, in 0..255 of any dtype.

        The fourth number of a pixel is not looked at: `decode_image` and an opaque canvas have blended it in.
        """
        height, width = raw.shape[0], raw.shape[1]
        side: Any = torch.sym_min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        channels = raw.shape[2]
        # The rows of the square are chosen with those of each group.
        columns_HN = raw[:, left : left + side].reshape(height, -1)
        high_SN = self._rows(columns_HN, side, top)
        high_MN = high_SN.reshape(self.size, -1, channels).transpose(0, 1).reshape(-1, self.size * channels)
        wide_SN = self._rows(high_MN, side, 0)
        return wide_SN.reshape(self.size, self.size, channels)[..., :3].transpose(0, 1).contiguous()

    def _rows(self, picture_HN: Tensor, side: int, first: int) -> Tensor:
        """Rows `[S, N]`, each a weighted mean of those of the `side` rows from `first` on that are near it."""
        size = self.size
        rows = min(ROWS, size)
        groups = -(-size // rows)
        reach: Any = torch.sym_max(side, size)
        # In 1/size of a row of the picture: from before the first row that a group can need to behind the last.
        length: Any = torch.sym_min(((rows - 1) * side + 2 * reach) // size + 2, side)
        centre_S = (torch.arange(groups * rows, dtype=torch.float64) + 0.5) * side / size
        centre_GR = centre_S.reshape(groups, rows)
        start_G = (centre_GR[:, 0] - reach / size - 0.5).floor().to(torch.int64).clamp(min=0)
        start_G = torch.minimum(start_G, torch.full((), side, dtype=torch.int64) - length)
        at_GL = start_G[:, None] + torch.arange(length)
        away_GRL = (at_GL[:, None] + 0.5 - centre_GR[:, :, None]).abs() * size / reach
        weight_GRL = (1 - away_GRL).clamp(min=0)
        weight_GRL = weight_GRL / weight_GRL.sum(2, keepdim=True)
        # One group after the other: fractions of all of a large picture would take hundreds of megabytes.
        made = [
            weight_RL @ picture_HN.index_select(0, at_L).float()
            for weight_RL, at_L in zip(weight_GRL.float().unbind(), (at_GL + first).unbind(), strict=True)
        ]
        return torch.cat(made)[:size]
