"""Resizing along one axis, with antialiasing."""

from typing import Any

import torch
from torch import Tensor

# L rows of a picture, P pixels of a row in one channel, C channels, K channels that are kept
# S rows of the result, G groups of them, R rows of a group, T input rows of a group

# Output rows per matrix product: fewer copy input rows more often, more multiply with more zeros. Of 4, 8 and 16 it was
# the fastest in WASM; natively 16 was as fast.
ROWS = 8


def resize_rows(
    picture_LxC_P: Tensor,
    *,
    length: Any,
    share: Any,
    whole: int,
    size: int,
    first: Any = 0,
    channels: Any = 1,
    keep: int = 1,
) -> Tensor:
    """Resize rows of a picture by bilinear interpolation with antialiasing.

    An output row is the mean of the nearby input rows, weighted by a triangle two output rows wide (two input rows if
    the picture is enlarged). Weights are multiplied in float32, so that every runtime of the exported graph gives the
    same numbers. Sizes may be symbolic in an export.

    Args:
        picture_LxC_P: The picture `[L * C, P]`, of any dtype: a row has one line of `P` numbers for each channel.
        length: Number of input rows that are resized.
        share: Input rows for `whole` output rows.
        whole: See `share`.
        size: Number of output rows; those whose middle is beyond the input are 0.
        first: Index of the first input row.
        channels: Number of channels, C.
        keep: Number of the first channels that the result has, K.

    Returns:
        Float32 `[S * K, P]`.
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
    weight_GRT = (weight_GRT * (centre_GR < length)[:, :, None]).float()
    at_GT = at_GT + first
    if keep > 1:
        # All channels in one product, with zeros between them: small products and copies take longer than zeros do.
        weight_GRT = (weight_GRT[:, :, None, None] * torch.eye(keep)[:, :, None]).reshape(
            groups, rows * keep, keep * taken
        )
        at_GT = (at_GT[:, None] * channels + torch.arange(keep)[:, None]).reshape(groups, keep * taken)
    # One group at a time, because all of a large image as floats would take hundreds of megabytes.
    made = [
        weight_1RT @ picture_LxC_P.index_select(0, at_1T.reshape(-1)).float()
        for weight_1RT, at_1T in zip(weight_GRT.split(1), at_GT.split(1), strict=True)
    ]
    return torch.cat(made).reshape(groups * rows * keep, -1)[: size * keep]
