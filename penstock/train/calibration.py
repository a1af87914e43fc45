"""Calibration of a classifier's probabilities: temperature scaling, and its error measures."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# n examples, K classes

BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
BISECTIONS = 60


def temperature_of(logits: Tensor, labels: Tensor) -> float:
    """Fit the temperature, the divisor of the logits that minimises the cross-entropy of their softmax.

    Guo et al. 2017, "On calibration of modern neural networks", section 4.2. The loss is convex in the reciprocal of
    the temperature, so bisection on its slope finds the minimum.

    Args:
        logits: `[n, K]`, of held-out examples.
        labels: `[n]`.

    Returns:
        The temperature, from 0.05 to 20.
    """
    logits, labels = logits.double(), labels.long()
    count, classes = logits.shape
    right_n = logits.gather(1, labels[:, None])[:, 0]
    others_n = (logits.sum(1) - right_n) / max(1, classes - 1)
    wanted = ((count + 1) * right_n + others_n).mean() / (count + 2)
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slope = ((logits * middle).softmax(1) * logits).sum(1).mean() - wanted
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 2 / (low + high)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: the mean difference between confidence and accuracy.

    Guo et al. 2017, equation 3: the mean over equal bins of confidence, weighted by their numbers of examples.

    Args:
        probabilities: `[n, K]`.
        labels: `[n]`.
        bins: Number of bins.
    """
    weighted = (count * abs(sure - right) for count, sure, right in reliability(probabilities, labels, bins))
    return sum(weighted) / len(labels)


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> list[tuple[int, float, float]]:
    """Return (number of examples, mean confidence, accuracy) of each bin that is not empty."""
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
    """Mean cross-entropy of logits `[n, K]` divided by a temperature."""
    return F.cross_entropy(logits.double() / temperature, labels.long()).item()
