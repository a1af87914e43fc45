"""Evaluation report of a training: accuracies, classes, confusion and calibration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.recognition import kinds_and_groups
from penstock.core.spec import Array
from penstock.train.calibration import calibration_error, negative_log_likelihood, reliability, temperature_of
from penstock.train.recipe import Predictions

# n examples, K classes

REPORT_FILE, PICTURE_FILE = "report.json", "confusion.png"
# More names than this are not legible in the figure.
MAX_NAMES = 60
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def write_report(
    folder: Path, validation: Predictions, test: Predictions, *, labels: tuple[str, ...]
) -> Mapping[str, Tensor]:
    """Fit the temperature on the validation set, and write the report on the test set.

    Args:
        folder: Where `report.json` and `confusion.png` go.
        validation: Logits and labels.
        test: Logits and labels.
        labels: Names of the classes, in order.

    Returns:
        The network's `temperature`.
    """
    temperature = temperature_of(validation.outputs, validation.targets)
    report, confusion_KK, bins = report_of(test, temperature, labels)
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    draw(folder / PICTURE_FILE, confusion_KK, bins, kinds_and_groups(labels)[0])
    return {"temperature": torch.tensor(temperature)}


def report_of(
    test: Predictions, temperature: float, labels: tuple[str, ...]
) -> tuple[dict[str, Any], Array, list[tuple[int, float, float]]]:
    """The report as JSON values, the confusion matrix (rows are true classes), and the bins of `reliability`.

    Args:
        test: Logits and labels.
        temperature: Divisor of the logits.
        labels: Names of the classes, in order.
    """
    targets_n = test.targets.long()
    before_nK, chances_nK = test.outputs.softmax(1), (test.outputs / temperature).softmax(1)
    order_nK = chances_nK.argsort(1, descending=True)
    right_nK = order_nK == targets_n[:, None]
    kinds, groups = kinds_and_groups(labels)
    count = len(labels)
    confusion_KK = np.bincount((targets_n * count + order_nK[:, 0]).numpy(), minlength=count * count)
    confusion_KK = confusion_KK.reshape(count, count)
    names = sorted(set(groups))
    group_K = torch.tensor([names.index(group) for group in groups])
    group_chances = torch.zeros(len(targets_n), len(names)).index_add_(1, group_K, chances_nK)
    report = {
        "examples": len(targets_n),
        "top1": right_nK[:, 0].double().mean().item(),
        "top5": right_nK[:, :5].any(1).double().mean().item(),
        "group_top1": (group_chances.argmax(1) == group_K[targets_n]).double().mean().item(),
        "temperature": temperature,
        "calibration_error": calibration_error(chances_nK, targets_n),
        "calibration_error_without_temperature": calibration_error(before_nK, targets_n),
        "negative_log_likelihood": negative_log_likelihood(test.outputs, targets_n, temperature),
        "unsure_below": [_of_threshold(value, chances_nK.amax(1), right_nK[:, 0]) for value in THRESHOLDS],
        "classes": [_of_class(index, label, confusion_KK) for index, label in enumerate(labels)],
        "most_confused": _most_confused(confusion_KK, kinds),
    }
    return report, confusion_KK, reliability(chances_nK, targets_n)


def _of_threshold(value: float, most_n: Tensor, right_n: Tensor) -> dict[str, Any]:
    """Coverage and accuracy of the answers with at least this probability."""
    named_n = most_n >= value
    right = right_n[named_n].double().mean().item() if named_n.any() else None
    return {"unsure_below": value, "named": named_n.double().mean().item(), "right": right}


def _of_class(index: int, label: str, confusion_KK: Array) -> dict[str, Any]:
    right, predicted, actual = (int(part) for part in (
        confusion_KK[index, index], confusion_KK[:, index].sum(), confusion_KK[index].sum()
    ))  # fmt: skip
    return {
        "label": label,
        "examples": actual,
        "recall": right / actual if actual else None,
        "precision": right / predicted if predicted else None,
        "f1": 2 * right / (predicted + actual) if predicted + actual else None,
    }


def _most_confused(confusion_KK: Array, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    wrong_KK = confusion_KK * (1 - np.eye(len(kinds), dtype=np.int64))
    pairs = [divmod(int(place), len(kinds)) for place in np.argsort(-wrong_KK, axis=None, kind="stable")[:10]]
    return [
        {"is": kinds[row], "taken_for": kinds[column], "times": int(wrong_KK[row, column])}
        for row, column in pairs
        if wrong_KK[row, column]
    ]


def draw(file: Path, confusion_KK: Array, bins: list[tuple[int, float, float]], kinds: tuple[str, ...]) -> None:
    """Draw the confusion matrix and the reliability diagram.

    Args:
        file: The PNG to write.
        confusion_KK: Rows are true classes, columns predicted ones.
        bins: From `reliability`.
        kinds: Names of the classes.
    """
    from matplotlib.figure import Figure

    side = min(14.0, 4 + 0.22 * len(kinds))
    figure = Figure(figsize=(side + 4.5, side), layout="constrained")
    matrix, sure = figure.subplots(1, 2, width_ratios=[side, 4])
    share_KK = confusion_KK / np.maximum(1, confusion_KK.sum(1, keepdims=True))
    shown = matrix.imshow(share_KK, cmap="Blues", vmin=0, vmax=1)
    matrix.set(xlabel="taken for", ylabel="is")
    if len(kinds) <= MAX_NAMES:
        places = range(len(kinds))
        matrix.set_xticks(places, kinds, rotation=90)
        matrix.set_yticks(places, kinds)
    for row, column in np.argwhere(confusion_KK)[: 4 * MAX_NAMES].tolist() if len(kinds) <= MAX_NAMES // 2 else []:
        light = "white" if share_KK[row, column] > 0.5 else "black"
        matrix.text(column, row, str(confusion_KK[row, column]), ha="center", va="center", color=light, size=7)
    figure.colorbar(shown, ax=matrix, label="share of the row", shrink=0.6)
    sure.plot([0, 1], [0, 1], color="grey", linewidth=1)
    counts, chances, right = zip(*bins, strict=True)
    sure.scatter(chances, right, s=[10 + 300 * count / sum(counts) for count in counts])
    sure.set(xlabel="probability of the likeliest", ylabel="share that is right", xlim=(0, 1.02), ylim=(0, 1.02))
    sure.set_aspect("equal")
    figure.savefig(file, dpi=120)
