"""Resizing along one axis, with antialiasing."""

from typing import Any

import torch
from torch import Tensor

# L rows of a picture, N numbers in a row; S rows of the result, G groups of them, R rows of a group, T input rows of a
# group

# Output rows per matrix product: fewer copy input rows more often, more multiply with more zeros. Of 4, 8 and 16 it was
# the fastest in WASM; natively 4 was as fast.
ROWS = 8


def resize_rows(picture_LN: Tensor, *, length: Any, share: Any, whole: int, size: int, first: Any = 0) -> Tensor:
    """Resize rows of a picture by bilinear interpolation with antialiasing.

    An output row is the mean of the nearby input rows, weighted by a triangle two output rows wide (two input rows if
    the picture is enlarged). Weights are multiplied in float32, so that every runtime of the exported graph gives the
    same numbers. Sizes may be symbolic in an export.

    Args:
        picture_LN: The picture, of any dtype.
        length: Number of input rows that are resized.
        share: Input rows for `whole` output rows.
        whole: See `share`.
        size: Number of output rows; those whose middle is beyond the input are 0.
        first: Index of the first input row.

    Returns:
        Float32 `[S, N]`.
    """
    rows = min(ROWS, size)
    groups = -(-size // rows)
    reach: Any = torch.sym_max(share, whole)
    # Number of input rows that a group can need.
    taken: Any = torch.sym_min(((rows - 1) * share + 2 * reach) // whole + 2, length)
    centre_S = (torch.arange(groups * rows, dtype=torch.float64) + 0.5) * share / whole
    centre_GR = centre_S.reshape(groups, rows)
    start_G = (centre_GR[:, 0] - reach / whole - 0.5).floor().to(torch.int64).clamp(min=0)
    start_G = torch.minimum(start_G, torch.full((), length, dtype=torch.int64) - taken)
    at_GT = start_G[:, None] + torch.arange(taken)
    away_GRT = (at_GT[:, None] + 0.5 - centre_GR[:, :, None]).abs() * whole / reach
    weight_GRT = (1 - away_GRT).clamp(min=0)
    weight_GRT = weight_GRT / weight_GRT.sum(2, keepdim=True).clamp(min=1e-9)
    weight_GRT = weight_GRT * (centre_GR < length)[:, :, None]
    # One group at a time, because all of a large image as floats would take hundreds of megabytes.
    made = [
        weight_RT @ picture_LN.index_select(0, at_T).float()
        for weight_RT, at_T in zip(weight_GRT.float().unbind(), (at_GT + first).unbind(), strict=True)
    ]
    return torch.cat(made)[:size]
