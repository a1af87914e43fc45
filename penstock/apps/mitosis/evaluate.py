"""F1 of finds against annotated figures, at the distance of the challenges.

A find is right if an annotated figure that no better find has is within 7.5 um (30 pixels of 0.25 um) of its centre:
Aubreville et al. 2023, "Mitosis domain generalization in histopathology images: the MIDOG challenge".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.apps.mitosis.app import MATCH_PX
from penstock.core.pictures.dense import Find
from penstock.core.spec import Array

# n finds, m figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """Finds of some slides, matched one to one with the figures.

    Args:
        score: Of each find, `[n]`.
        right: Whether it is a figure, `[n]` bool.
        figures: Number of annotated figures.
    """

    score: Array
    right: Array
    figures: int

    @classmethod
    def joined(cls, parts: "Sequence[Matches]") -> "Matches":
        """The matches of several slides."""
        return cls(
            score=np.concatenate([np.empty(0), *(part.score for part in parts)]),
            right=np.concatenate([np.empty(0, bool), *(part.right for part in parts)]),
            figures=sum(part.figures for part in parts),
        )

    def f1(self, threshold: float = 0.0) -> float:
        """F1 of the finds with at least this score; 1 if there is nothing and nothing was found."""
        kept = self.score >= threshold
        found, right = int(kept.sum()), int(self.right[kept].sum())
        return 2 * right / (found + self.figures) if found + self.figures else 1.0

    def best_threshold(self) -> tuple[float, float]:
        """The threshold with the highest F1, halfway between two scores, and that F1."""
        order = np.argsort(-self.score, kind="stable")
        score_n, right_n = self.score[order], np.cumsum(self.right[order])
        if not len(score_n):
            return 0.5, self.f1()
        f1_n = 2 * right_n / (np.arange(1, len(score_n) + 1) + self.figures)
        best = int(f1_n.argmax())
        below = score_n[best + 1] if best + 1 < len(score_n) else score_n[best] / 2
        return float((score_n[best] + below) / 2), float(f1_n[best])


def match(finds: Sequence[Find], figures_m2: Array, distance: float = MATCH_PX) -> Matches:
    """Match finds with figures, the highest score first; each takes the nearest free figure within the distance.

    Args:
        finds: Of one slide.
        figures_m2: Centres of the annotated figures, x and y in pixels.
        distance: In pixels.
    """
    order = sorted(finds, key=lambda find: -find.score)
    free_m = np.ones(len(figures_m2), bool)
    right_n = np.zeros(len(order), bool)
    for number, find in enumerate(order):
        away_m = np.hypot(figures_m2[:, 0] - find.x, figures_m2[:, 1] - find.y) if len(figures_m2) else np.empty(0)
        near_m = np.where(free_m, away_m, np.inf)
        if len(near_m) and near_m.min() <= distance:
            free_m[near_m.argmin()] = False
            right_n[number] = True
    return Matches(score=np.array([find.score for find in order]), right=right_n, figures=len(figures_m2))
