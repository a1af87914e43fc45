"""Boxes of a detector with anchors: the best of them, without those that overlap a better one of their class."""

from typing import final

import torch
from torch import Tensor, nn

# B batch, A anchors, K classes, C candidates, N boxes


@final
class BestBoxes(nn.Module):
    """Greedy suppression of boxes (NMS) in tensors of fixed sizes, so that it is exported and runs in a browser too.

    Args:
        candidates: Boxes with the largest scores that are considered, over all classes. The graph has five operations
            for each.
        most: Boxes at most.
        threshold: Smallest score.
        overlap: Intersection over union above which the box with the smaller score is left out.
    """

    def __init__(
        self,
        *,
        candidates: int = 100,
        most: int = 50,
        threshold: float = 0.05,
        overlap: float = 0.5,
    ) -> None:
        super().__init__()
        self.candidates, self.most = candidates, most
        self.threshold, self.overlap = threshold, overlap

    def forward(self, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        """Choose boxes.

        Args:
            boxes: Left, top, right, bottom for each anchor, `[B, A, 4]`.
            scores: For each class, `[B, A, K]`.

        Returns:
            `boxes` float32 `[B, N, 4]`, `classes` int64 `[B, N]` and `scores` float32 `[B, N]`, the largest score
            first; and `objects`, the number of valid ones, int64 `[B]`.
        """
        kinds = scores.shape[2]
        score_BC, at_BC = scores.float().flatten(1).topk(self.candidates)
        class_BC, anchor_BC = at_BC % kinds, at_BC // kinds
        box_BC4 = boxes.float().gather(1, anchor_BC[..., None].expand(-1, -1, 4))
        kept_BC = self._kept(box_BC4, class_BC)
        best_BN, place_BN = (score_BC * kept_BC).topk(self.most)
        return {
            "boxes": box_BC4.gather(1, place_BN[..., None].expand(-1, -1, 4)),
            "classes": class_BC.gather(1, place_BN),
            "scores": best_BN,
            "objects": (best_BN >= self.threshold).sum(1),
        }

    def _kept(self, box_BC4: Tensor, class_BC: Tensor) -> Tensor:
        """1 for each box that no better one suppresses, else 0; the boxes are in the order of their scores."""
        low = torch.maximum(box_BC4[:, :, None, :2], box_BC4[:, None, :, :2])
        high = torch.minimum(box_BC4[:, :, None, 2:], box_BC4[:, None, :, 2:])
        both_BCC = (high - low).clamp(min=0).prod(-1)
        area_BC = (box_BC4[..., 2:] - box_BC4[..., :2]).clamp(min=0).prod(-1)
        union_BCC = area_BC[:, :, None] + area_BC[:, None] - both_BCC
        suppresses_BCC = (both_BCC > self.overlap * union_BCC) & (class_BC[:, :, None] == class_BC[:, None])
        # Of the first on the second, where the first has the larger score.
        suppresses_BCC = suppresses_BCC.float().triu(1)
        kept_BC = torch.ones_like(area_BC)
        for row in range(self.candidates):
            kept_BC = kept_BC * (1 - kept_BC[:, row, None] * suppresses_BCC[:, row])
        return kept_BC
