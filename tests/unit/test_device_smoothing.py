"""What is smoothed_answer over frames; `tests/data/smoothing.json` holds Python and the web app to the same numbers.

`python -m tests.unit.test_device_smoothing` writes that file anew, for a change that is meant.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.recognition import Recognition
from penstock.device.smoothing import Smoothed, smooth, smoothed_answer

VECTORS = Path(__file__).parents[1] / "data" / "smoothing.json"
TWO = Recognition(labels=("cat", "dog"))
PETS = Recognition(labels=("pug", "beagle", "tabby", "daisy"), groups=("dog", "dog", "cat", "flower"))
FRAME_S = 0.1


def run(recognition: Recognition, frames: list[list[float]], step_s: float = FRAME_S) -> list[dict[str, Any]]:
    smoothed: Smoothed | None = None
    answers: list[dict[str, Any]] = []
    for number, probabilities in enumerate(frames):
        smoothed = smooth(recognition, smoothed, np.array(probabilities), number * step_s)
        answers.append(smoothed_answer(recognition, smoothed))
    return answers


def test_the_first_frame_counts_alone() -> None:
    assert run(TWO, [[0.9, 0.1]]) == [TWO.answer(np.array([0.9, 0.1]))]


def test_after_the_half_life_half_of_the_mean_is_new() -> None:
    smoothed = smooth(TWO, None, np.array([1.0, 0.0]), 5.0)
    smoothed = smooth(TWO, smoothed, np.array([0.0, 1.0]), 5.0 + TWO.half_life_s)
    assert smoothed.mean_L.tolist() == pytest.approx([0.5, 0.5])


def test_how_many_frames_a_second_has_does_not_matter() -> None:
    slow = run(TWO, [[1.0, 0.0], *[[0.2, 0.8]] * 2], 0.3)[-1]
    fast = run(TWO, [[1.0, 0.0], *[[0.2, 0.8]] * 60], 0.01)[-1]
    assert slow["probability"] == pytest.approx(fast["probability"], abs=1e-12)


def test_one_odd_frame_changes_nothing_that_is_shown() -> None:
    answers = run(TWO, [[0.95, 0.05]] * 5 + [[0.0, 1.0]] + [[0.95, 0.05]] * 5)
    assert {answer["group"] for answer in answers} == {"cat"}


def test_shown_between_leave_and_enter_only_if_it_was_shown_before() -> None:
    assert [answer["group"] for answer in run(TWO, [[0.5, 0.5]] * 3)] == [None] * 3
    still = run(TWO, [[0.9, 0.1]] + [[0.5, 0.5]] * 20)
    assert [answer["group"] for answer in still] == ["cat"] * 21
    assert still[-1]["group_probability"] == pytest.approx(0.5, abs=0.01)


def test_below_leave_it_is_unsure_and_another_takes_over_at_enter() -> None:
    answers = [answer["group"] for answer in run(TWO, [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 12)]
    # Two classes: one falls below 0.4 as the other reaches 0.6.
    assert answers[:3] == ["cat"] * 3
    assert answers[-1] == "dog"
    three = Recognition(labels=("a", "b", "c"))
    assert run(three, [[0.8, 0.1, 0.1]] + [[0.3, 0.4, 0.3]] * 20)[-1]["unsure"] is True


def test_a_general_class_is_told_without_its_kind() -> None:
    answer = run(PETS, [[0.42, 0.4, 0.1, 0.08]])[0]
    assert (answer["group"], answer["label"], answer["unsure"]) == ("dog", "pug", False)
    strict = Recognition(labels=PETS.labels, groups=PETS.groups, unsure_below=0.6)
    assert run(strict, [[0.42, 0.4, 0.1, 0.08]])[0]["label"] is None


def test_time_neither_runs_back_nor_further_than_a_second() -> None:
    first = smooth(TWO, None, np.array([1.0, 0.0]), 10.0)
    assert smooth(TWO, first, np.array([0.0, 1.0]), 9.0).mean_L.tolist() == [1.0, 0.0]
    hour, second = (smooth(TWO, first, np.array([0.0, 1.0]), 10.0 + step_s) for step_s in (3600.0, 1.0))
    assert hour.mean_L.tolist() == second.mean_L.tolist()


def vectors() -> list[dict[str, Any]]:
    """Cases that the web app is held to as well: random walks of several applications, odd times included."""
    random = np.random.default_rng(0)
    cases: list[dict[str, Any]] = []
    for recognition in (TWO, PETS, Recognition(labels=tuple("abcdefg"), half_life_s=0.8, enter=0.45, leave=0.2)):
        logits, time_s, smoothed = random.standard_normal(len(recognition.labels)) * 2, 100.0, None
        frames: list[dict[str, Any]] = []
        for number in range(40):
            logits = 0.8 * logits + random.standard_normal(len(logits)) * 1.5
            probabilities = np.exp(logits) / np.exp(logits).sum()
            if number == 20:  # a tie
                probabilities = np.full(len(logits), 1 / len(logits))
            time_s += {10: -0.5, 30: 7.0}.get(number, float(random.uniform(0.01, 0.2)))
            smoothed = smooth(recognition, smoothed, probabilities, time_s)
            frame = {"time_s": time_s, "probabilities": probabilities.tolist(), "mean": smoothed.mean_L.tolist()}
            frames.append({**frame, "shown": smoothed_answer(recognition, smoothed)})
        cases.append({"recognition": recognition.to_json(), "frames": frames})
    return cases


def test_the_vectors_are_what_it_gives() -> None:
    cases: list[dict[str, Any]] = json.loads(VECTORS.read_text())
    assert len(cases) == 3
    seen: set[bool] = set()
    for case in cases:
        recognition, smoothed = Recognition.from_json(case["recognition"]), None
        for frame in case["frames"]:
            smoothed = smooth(recognition, smoothed, np.array(frame["probabilities"]), frame["time_s"])
            np.testing.assert_allclose(smoothed.mean_L, frame["mean"], rtol=0, atol=1e-12)
            answer = smoothed_answer(recognition, smoothed)
            for name in ("label", "group", "unsure"):
                assert answer[name] == frame["shown"][name]
            for name in ("probability", "group_probability"):
                assert answer[name] == pytest.approx(frame["shown"][name], abs=1e-12)
            assert [label for label, _ in answer["top"]] == [label for label, _ in frame["shown"]["top"]]
            seen.add(answer["unsure"])
    assert seen == {True, False}


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(vectors(), indent=1) + "\n")
