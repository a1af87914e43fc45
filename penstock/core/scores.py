"""Distinguish scores of classes from other numbers that have labels."""

import re

from penstock.core.spec import TensorSpec

PROBABILITY = "probability"
_SCORES = re.compile(r"probab|logit|score|confidence|likelihood", re.IGNORECASE)


def are_scores(spec: TensorSpec) -> bool:
    """True if a tensor has a score of each label, so that the largest is the answer.

    The units say so: empty, or such as `"probability"`, `"log-probability"`, `"logit"`, `"score"`. With other units,
    such as `"m/s"`, the labels are names of quantities.
    """
    return bool(spec.labels) and (not spec.units or _SCORES.search(spec.units) is not None)


def score_text(spec: TensorSpec, score: float) -> str:
    """A score in percent if its units are a probability; otherwise the number with its units."""
    if spec.units == PROBABILITY:
        return f"{score:.0%}"
    return f"{score:.4g}{spec.units and f' {spec.units}'}"
