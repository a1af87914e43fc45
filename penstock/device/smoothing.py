"""What is shown over the frames of a video: probabilities are smoothed, and what is shown changes with hysteresis.

The web app has the same in `web/smoothing.js`, and `tests/data/smoothing.json` holds both to it. All in float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.recognition import TOP, Recognition
from penstock.core.spec import Array

# L labels

# Of a source that paused longer, the past counts no less than after this.
LONGEST_STEP_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothed:
    """What is remembered from one frame to the next.

    Args:
        mean_L: The smoothed probabilities, `[labels]`.
        time_s: When the last frame was taken, on the source's clock.
        group: The general class that is shown; None while unsure.
    """

    mean_L: npt.NDArray[np.float64]
    time_s: float
    group: str | None


def smooth(recognition: Recognition, before: Smoothed | None, probabilities_L: Array, time_s: float) -> Smoothed:
    """One frame more.

    The mean goes towards the frame's probabilities by `1 - 2 ** (-dt / half_life_s)`, so that it does not matter how
    many frames a second has. A general class is shown once its mean probability is at least `enter`; it stays while
    that is at least `leave` and no other reaches `enter`.

    Args:
        recognition: The application's labels and constants.
        before: What the frame before left; None at first.
        probabilities_L: The network's, `[labels]`.
        time_s: When the frame was taken, on the source's clock.
    """
    probabilities_L = np.asarray(probabilities_L, np.float64)
    if before is None:
        mean_L, group = probabilities_L, None
    else:
        step_s = min(max(time_s - before.time_s, 0.0), LONGEST_STEP_S)
        weight = 1.0 - 2.0 ** (-step_s / recognition.half_life_s)
        mean_L, group = before.mean_L + weight * (probabilities_L - before.mean_L), before.group
    sums = group_sums(recognition, mean_L)
    likeliest = max(sums, key=lambda name: sums[name])
    if sums[likeliest] >= recognition.enter:
        group = likeliest
    elif group is not None and sums[group] < recognition.leave:
        group = None
    return Smoothed(mean_L=mean_L, time_s=time_s, group=group)


def shown(recognition: Recognition, smoothed: Smoothed) -> dict[str, Any]:
    """What is shown, in the fields of `Recognition.answer`, of which `group` and `unsure` follow the hysteresis.

    Returns:
        `label`: the likeliest kind of the group that is shown, None where its share of the group is below
        `unsure_below`; `group`; `probability` and `group_probability`, both smoothed, of that kind and group or, while
        unsure, of the likeliest; `unsure`: whether no group is shown; `top`: up to five `[label, probability]`.
    """
    mean_L, labels, group_of = smoothed.mean_L, recognition.labels, recognition.group_of
    sums = group_sums(recognition, mean_L)
    group = smoothed.group if smoothed.group is not None else max(sums, key=lambda name: sums[name])
    kind = max((index for index, name in enumerate(group_of) if name == group), key=lambda index: mean_L[index])
    probability = float(mean_L[kind])
    named = smoothed.group is not None and probability >= recognition.unsure_below * sums[group]
    top = np.argsort(-mean_L, kind="stable")[:TOP]
    return {
        "label": labels[kind] if named else None,
        "group": smoothed.group,
        "probability": probability,
        "group_probability": sums[group],
        "unsure": smoothed.group is None,
        "top": [[labels[index], float(mean_L[index])] for index in top],
    }


def group_sums(recognition: Recognition, probabilities_L: npt.NDArray[np.float64]) -> dict[str, float]:
    """The probability of each general class, in the order in which their labels come."""
    sums: dict[str, float] = {}
    for group, probability in zip(recognition.group_of, probabilities_L.tolist(), strict=True):
        sums[group] = sums.get(group, 0.0) + probability
    return sums
