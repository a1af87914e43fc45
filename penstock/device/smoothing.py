"""Smooth a classifier's probabilities over the frames of a video; the shown class changes with hysteresis.

`web/smoothing.js` computes the same; `tests/data/smoothing.json` tests both. All in float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.recognition import Recognition
from penstock.core.spec import Array

# L labels

# A longer pause of the source counts as this.
MAX_STEP_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothed:
    """State from one frame to the next.

    Args:
        mean_L: Smoothed probabilities, `[labels]`.
        time_s: Time of the last frame, on the source's clock.
        group: Index of the shown group; None while unsure.
    """

    mean_L: npt.NDArray[np.float64]
    time_s: float
    group: int | None


def smooth(recognition: Recognition, before: Smoothed | None, probabilities_L: Array, time_s: float) -> Smoothed:
    """Add a frame.

    The mean moves towards the frame's probabilities by `1 - 2 ** (-dt / half_life_s)`, independently of the frame rate.
    A group is shown once its mean probability reaches `enter`; it stays while that is at least `leave` and no other
    reaches `enter`.

    Args:
        recognition: Labels and thresholds.
        before: State after the frame before; None at first.
        probabilities_L: The network's output, `[labels]`.
        time_s: Time of the frame, on the source's clock.
    """
    probabilities_L = np.asarray(probabilities_L, np.float64)
    if before is None:
        mean_L, group = probabilities_L, None
    else:
        step_s = min(max(time_s - before.time_s, 0.0), MAX_STEP_S)
        weight = 1.0 - 2.0 ** (-step_s / recognition.half_life_s)
        mean_L, group = before.mean_L + weight * (probabilities_L - before.mean_L), before.group
    sums_G = recognition.group_sums(mean_L)
    likeliest = int(sums_G.argmax())
    if sums_G[likeliest] >= recognition.enter:
        group = likeliest
    elif group is not None and sums_G[group] < recognition.leave:
        group = None
    return Smoothed(mean_L=mean_L, time_s=time_s, group=group)


def smoothed_answer(recognition: Recognition, smoothed: Smoothed) -> dict[str, Any]:
    """The answer in the fields of `Recognition.answer`; `group` and `unsure` follow the hysteresis.

    Returns:
        `label`: the likeliest label of the shown group, None if its share of the group is below `unsure_below`;
        `group`; `probability` and `group_probability`, smoothed, of that label and group or, while unsure, of the
        likeliest; `unsure`: whether no group is shown; `top`: up to five `[label, probability]`.
    """
    sums_G = recognition.group_sums(smoothed.mean_L)
    group = int(sums_G.argmax()) if smoothed.group is None else smoothed.group
    return recognition.answer_with_group(smoothed.mean_L, sums_G, group, sure=smoothed.group is not None)
