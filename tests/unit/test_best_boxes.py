"""The best boxes of a detector with anchors are those of greedy suppression, box by box."""

import numpy as np
import pytest
import torch

from penstock.apps.detect.precision import iou
from penstock.core.spec import Array
from penstock.nn.best_boxes import BestBoxes


def greedy(boxes: Array, scores: Array, *, most: int, threshold: float, overlap: float) -> list[tuple[int, int]]:
    """Pairs of an anchor and a class, the largest score first."""
    order = [(int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in np.argsort(-scores, axis=None)]
    kept: list[tuple[int, int]] = []
    for anchor, kind in order:
        mine = [other for other, same in kept if same == kind]
        if scores[anchor, kind] >= threshold and not (iou(boxes[[anchor]], boxes[mine]) > overlap).any():
            kept.append((anchor, kind))
    return kept[:most]


@pytest.mark.parametrize("seed", range(4))
def test_boxes_are_suppressed_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner, size = rng.uniform(0, 60, (2, 40, 2)), rng.uniform(10, 40, (2, 40, 2))
    boxes, scores = (
        np.concatenate([corner, corner + size], 2).astype(np.float32),
        rng.permutation(240).reshape(2, 40, 3) / 240,
    )
    made = BestBoxes(candidates=120, most=30, threshold=0.3, overlap=0.4)(torch.tensor(boxes), torch.tensor(scores))
    for row in range(2):
        expected = greedy(boxes[row], scores[row], most=30, threshold=0.3, overlap=0.4)
        count = int(made["objects"][row])
        assert 0 < count == len(expected)
        assert made["classes"][row, :count].tolist() == [kind for _, kind in expected]
        assert made["boxes"][row, :count].tolist() == [boxes[row, anchor].tolist() for anchor, _ in expected]
        assert made["scores"][row, :count].tolist() == pytest.approx([scores[row][each] for each in expected])


def test_nothing_is_found_below_the_threshold() -> None:
    made = BestBoxes(candidates=4, most=3, threshold=0.5)(torch.zeros(1, 5, 4), torch.full((1, 5, 2), 0.49))
    assert made["objects"].tolist() == [0]
