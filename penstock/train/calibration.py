"""How far the probabilities of a classifier can be believed, and what makes them so."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# n examples, K classes

BINS = 15
LEAST, MOST = 0.05, 20.0
HALVINGS = 60


def temperature_of(logits: Tensor, labels: Tensor) -> float:
    """What logits are to be divided by, so that their softmax has the least cross-entropy.

    Guo et al. 2017, "On calibration of modern neural networks", section 4.2. In the reciprocal of the temperature that
    is convex, so that halving an interval by the slope finds it.

    Args:
        logits: `[n, K]`, of examples that were not learned from.
        labels: `[n]`.

    Returns:
        From 0.05 to 20.
    """
    logits, labels = logits.double(), labels.long()
    count, classes = logits.shape
    right_n = logits.gather(1, labels[:, None])[:, 0]
    others_n = (logits.sum(1) - right_n) / max(1, classes - 1)
    wanted = ((count + 1) * right_n + others_n).mean() / (count + 2)
    low, high = 1 / MOST, 1 / LEAST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = ((logits * middle).softmax(1) * logits).sum(1).mean() - wanted
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 2 / (low + high)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: by how much the probability of the likeliest class misses how often it is right.

    Guo et al. 2017, equation 3: the mean over equal bins of probability, weighed by their examples.

    Args:
        probabilities: `[n, K]`.
        labels: `[n]`.
        bins: How many.
    """
    return sum(count * abs(sure - right) for count, sure, right in reliability(probabilities, labels, bins)) / len(
        labels
    )


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> list[tuple[int, float, float]]:
    """Of each bin that has some: its examples, their mean probability, and the share of them that is right."""
    most_n, best_n = probabilities.double().max(1)
    right_n = (best_n == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64).tolist()
    found: list[tuple[int, float, float]] = []
    for low, high in pairwise(edges):
        inside = (most_n > low) & (most_n <= high)
        if inside.any():
            found.append((int(inside.sum()), most_n[inside].mean().item(), right_n[inside].mean().item()))
    return found


def negative_log_likelihood(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """The mean cross-entropy of logits `[n, K]` that are divided by a temperature."""
    return F.cross_entropy(logits.double() / temperature, labels.long()).item()
