"""Boxes of a detector without anchors: where they are in its outputs, and the best of them."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, K classes, H height and W width of the heat map, N boxes, Q pixels H * W

# A side of 4,096 cells is beyond every picture; a larger exponent would overflow in training.
MAX_LOG_SIDE = 8.3
# Of the logits, for each cell.
SLOPE = 1e-3


def sides_of(sides: Tensor, stride: int) -> Tensor:
    """Distances in pixels from a cell's middle to the four sides of its box, from the network's logarithms."""
    return sides.clamp(max=MAX_LOG_SIDE).exp() * stride


def cell_middles(height: int, width: int, stride: int, device: torch.device | None = None) -> Tensor:
    """The middle of each cell in pixels, `[2, H, W]`: x, then y."""
    y_H = (torch.arange(height, device=device) + 0.5) * stride
    x_W = (torch.arange(width, device=device) + 0.5) * stride
    return torch.stack([x_W.expand(height, width), y_H[:, None].expand(height, width)])


@final
class PeakBoxes(nn.Module):
    """The boxes at the peaks of a heat map for each class, the largest scores first.

    A cell is a peak if no cell about it has a larger score, which takes the place of suppressing boxes that overlap:
    Zhou et al. 2019, "Objects as points", section 4.

    Args:
        stride: Pixels of the picture for each cell.
        most: Boxes at most.
        threshold: Smallest score.
        count: Name of the number of boxes among the results.
    """

    def __init__(self, *, stride: int, most: int, threshold: float, count: str = "objects") -> None:
        super().__init__()
        self.stride, self.most, self.threshold, self.count = stride, most, threshold, count

    def forward(self, heat: Tensor, sides: Tensor) -> dict[str, Tensor]:
        """Find boxes.

        Args:
            heat: Logits, `[B, K, H, W]`.
            sides: Logarithms of the distances to left, top, right and bottom in cells, `[B, 4, H, W]`.

        Returns:
            `boxes` float32 `[B, N, 4]`, left, top, right, bottom in pixels; `classes` int64 `[B, N]`; `scores` float32
            `[B, N]`; and the number of valid ones, int64 `[B]`.
        """
        _, _, height, width = heat.shape
        heat, sides = heat.float(), sides.float()
        # Peaks of the logits are those of the scores, which saturate. Where a picture is of one colour, all cells are
        # equal but for rounding: they are ranked by a slope that is steeper than that.
        down_H, across_W = torch.arange(height, device=heat.device), torch.arange(width, device=heat.device)
        ranked = heat + SLOPE * (2 * down_H[:, None] + across_W)
        is_peak = ranked >= F.max_pool2d(ranked, 3, stride=1, padding=1)
        score_BKQ = (heat.sigmoid() * is_peak).flatten(2)
        scores_BN, at_BN = score_BKQ.flatten(1).topk(self.most)
        classes_BN, cell_BN = at_BN // (height * width), at_BN % (height * width)
        cells_BN4 = cell_BN[:, None].expand(-1, 4, -1)
        away_B4N = sides_of(sides, self.stride).flatten(2).gather(2, cells_BN4)
        middle_2N = torch.stack([cell_BN % width, cell_BN // width], 1).to(heat.dtype).add(0.5).mul(self.stride)
        corners = torch.cat([middle_2N - away_B4N[:, :2], middle_2N + away_B4N[:, 2:]], 1).transpose(1, 2)
        x_BN2, y_BN2 = (corners[..., axis::2].clamp(0, size * self.stride) for axis, size in ((0, width), (1, height)))
        boxes = torch.stack([x_BN2, y_BN2], -1).flatten(2)
        count_B = (scores_BN >= self.threshold).sum(1)
        return {"boxes": boxes, "classes": classes_BN, "scores": scores_BN, self.count: count_B}
