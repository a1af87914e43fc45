"""Average precision of boxes, as COCO computes it at one overlap: a quick figure while a network is trained."""

import numpy as np

from penstock.core.spec import Array

# n found boxes, m true ones

RECALLS = np.linspace(0, 1, 101)
Boxes = tuple[Array, Array, Array]


def mean_average_precision(found: list[Boxes], true: list[tuple[Array, Array]], classes: int, overlap: float) -> float:
    """Mean over the classes of the average precision, interpolated at 101 recalls.

    Args:
        found: Boxes `[n, 4]`, classes `[n]` and scores `[n]` of each picture.
        true: Boxes `[m, 4]` and classes `[m]` of each picture.
        classes: Number of classes; one without true boxes does not count.
        overlap: Intersection over union from which a box is right.
    """
    each = [average_precision(found, true, kind, overlap) for kind in range(classes)]
    known = [one for one in each if one is not None]
    return float(np.mean(known)) if known else 0.0


def average_precision(found: list[Boxes], true: list[tuple[Array, Array]], kind: int, overlap: float) -> float | None:
    """Average precision of one class; None without true boxes."""
    total, scores, hits = 0, list[float](), list[bool]()
    for (boxes, kinds, score), (true_boxes, true_kinds) in zip(found, true, strict=True):
        wanted, mine = true_boxes[true_kinds == kind], kinds == kind
        total += len(wanted)
        order = np.argsort(-score[mine], kind="stable")
        shares, taken = iou(boxes[mine][order], wanted), np.zeros(len(wanted), np.bool_)
        for row, value in zip(shares, score[mine][order], strict=True):
            free = np.where(taken, -1.0, row)
            best = int(free.argmax()) if len(free) else -1
            hit = best >= 0 and free[best] >= overlap
            if hit:
                taken[best] = True
            scores.append(float(value))
            hits.append(bool(hit))
    if not total:
        return None
    right = np.array(hits, np.bool_)[np.argsort(-np.array(scores), kind="stable")]
    recall = right.cumsum() / total
    precision = right.cumsum() / np.arange(1, len(right) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(recall, RECALLS)
    return float(np.concatenate([precision, [0.0]])[np.minimum(at, len(precision))].mean())


def iou(one: Array, other: Array) -> Array:
    """Intersection over union of boxes, `[n, m]`."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clip(0).prod(2)
    area, other_area = ((each[:, 2:] - each[:, :2]).prod(1) for each in (one, other))
    return both / np.maximum(area[:, None] + other_area[None] - both, 1e-9)
