"""The loss of a detector without anchors: a focal loss of the heat map, and GIoU of the boxes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.nn.peak_boxes import cell_middles, sides_of

# B batch, M objects of a picture at most, K classes, H height and W width of the heat map

# Law and Deng 2018, "CornerNet", equation 1.
FOCUS, FADE = 2.0, 4.0
# Deviation of the Gaussian about an object's middle, as a share of each side, and in cells at least.
SPREAD, LEAST_SPREAD = 0.12, 0.6
# Cells about the middle of an object that learn its box.
REACH = 1.0
# Objects that a picture is taken to have, so that the loss is of order 1 and a mean over the batch.
OBJECTS = 4.0
BOX_WEIGHT = 2.0


def detection_loss(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, stride: int) -> Tensor:
    """The loss of a batch.

    Args:
        found: `heat` and `sides`, see `penstock.models.detector.CentreDetector`.
        wanted: `boxes` float `[B, M, 4]` in pixels, and `classes` `[B, M]`, -1 where there is no object.
        stride: Pixels of the picture for each cell.
    """
    heat, sides = found["heat"].float(), found["sides"].float()
    boxes, classes = wanted["boxes"].float(), wanted["classes"]
    exists_BM = classes >= 0
    # Distance in cells from each cell to the cell of each object's middle.
    middle_BM2 = (boxes[..., :2] + boxes[..., 2:]) / 2 / stride
    height, width = heat.shape[2:]
    size_BM2 = (boxes[..., 2:] - boxes[..., :2]) / stride
    cell_BM2 = middle_BM2.floor()
    across = torch.arange(width, device=heat.device) - cell_BM2[..., :1]
    down = torch.arange(height, device=heat.device) - cell_BM2[..., 1:]
    spread_BM2 = (size_BM2 * SPREAD).clamp(min=LEAST_SPREAD)
    gauss_BMHW = torch.exp(
        -((down / spread_BM2[..., 1:]) ** 2)[..., :, None] / 2 - ((across / spread_BM2[..., :1]) ** 2)[..., None, :] / 2
    )
    gauss_BMHW = gauss_BMHW * exists_BM[..., None, None]
    kinds = torch.arange(heat.shape[1], device=heat.device)
    of_kind_KBM = classes == kinds[:, None, None]
    target = torch.stack([(gauss_BMHW * mine[..., None, None]).amax(1) for mine in of_kind_KBM], 1)
    near_BMHW = (down.abs() <= REACH)[..., :, None] & (across.abs() <= REACH)[..., None, :]
    near_BMHW = near_BMHW & exists_BM[..., None, None]
    return _focal(heat, target) + BOX_WEIGHT * _box_loss(sides, boxes, near_BMHW, stride)


def _focal(heat: Tensor, target: Tensor) -> Tensor:
    score, is_middle = heat.sigmoid(), target > 0.999
    hit = (1 - score) ** FOCUS * F.logsigmoid(heat)
    miss = (1 - target) ** FADE * score**FOCUS * F.logsigmoid(-heat)
    return -torch.where(is_middle, hit, miss).sum() / (len(heat) * OBJECTS)


def _box_loss(sides: Tensor, boxes: Tensor, near_BMHW: Tensor, stride: int) -> Tensor:
    """GIoU (Rezatofighi et al. 2019) of the cells about each object's middle; the smallest object has the cell."""
    area_BM = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    ranked_BMHW = torch.where(near_BMHW, area_BM[..., None, None], torch.inf)
    least_BHW, owner_BHW = ranked_BMHW.min(1)
    learns_BHW = least_BHW < torch.inf
    batch, height, width = owner_BHW.shape
    owned = boxes.gather(1, owner_BHW.reshape(batch, -1, 1).expand(-1, -1, 4)).reshape(batch, height, width, 4)
    away = sides_of(sides, stride).permute(0, 2, 3, 1)
    middle = cell_middles(height, width, stride, sides.device).permute(1, 2, 0)
    made = torch.cat([middle - away[..., :2], middle + away[..., 2:]], -1)
    loss = torch.where(learns_BHW, 1 - _giou(made, owned), 0.0)
    return loss.sum() / (len(boxes) * OBJECTS * (2 * REACH + 1) ** 2)


def _giou(one: Tensor, other: Tensor) -> Tensor:
    def area(box: Tensor) -> Tensor:
        return (box[..., 2] - box[..., 0]).clamp(min=0) * (box[..., 3] - box[..., 1]).clamp(min=0)

    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    both = area(torch.cat([low, high], -1))
    union = area(one) + area(other) - both
    low, high = torch.minimum(one[..., :2], other[..., :2]), torch.maximum(one[..., 2:], other[..., 2:])
    hull = area(torch.cat([low, high], -1)).clamp(min=1e-6)
    return both / union.clamp(min=1e-6) - (hull - union) / hull


def augment(pixels: Any, wanted: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Any, dict[str, Tensor]]:
    """Mirror half of the pictures, and change brightness, contrast and colours of all."""
    count, device, width = len(pixels), pixels.device, pixels.shape[3]
    drawn = torch.rand(count, 6, generator=generator, device=generator.device).to(device)
    mirrored = drawn[:, 0] < 0.5
    pixels = pixels.float()
    pixels = torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels)
    colour = 0.8 + 0.4 * drawn[:, 1:4, None, None]
    light = (0.7 + 0.5 * drawn[:, 4])[:, None, None, None]
    pixels = (pixels * colour * light + 30 * (drawn[:, 5, None, None, None] - 0.5)).clamp(0, 255)
    boxes = wanted["boxes"]
    turned = torch.stack([width - boxes[..., 2], boxes[..., 1], width - boxes[..., 0], boxes[..., 3]], -1)
    return pixels, {**wanted, "boxes": torch.where(mirrored[:, None, None], turned, boxes)}
