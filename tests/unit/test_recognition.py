"""What is said of probabilities: by hand, against the shared vectors, and against plain Python."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput
from penstock.core.recognition import Recognition

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "recognition.json").read_text())
DOGS = Recognition(labels=("poodle", "boxer", "tulip"), groups=("dog", "dog", "flower"))


def plainly(recognition: Recognition, probabilities: list[float]) -> dict[str, Any]:
    """The same without NumPy, as the web app has it."""
    sums: dict[str, float] = {}
    for group, probability in zip(recognition.group_of, probabilities, strict=True):
        sums[group] = sums.get(group, 0.0) + probability
    group = max(sums, key=lambda name: sums[name])
    order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
    kind = next(index for index in order if recognition.group_of[index] == group)
    unsure = sums[group] < recognition.unsure_below
    named = not unsure and probabilities[kind] >= recognition.unsure_below * sums[group]
    return {
        "label": recognition.labels[kind] if named else None,
        "group": None if unsure else group,
        "probability": probabilities[kind],
        "group_probability": sums[group],
        "unsure": unsure,
        "top": [[recognition.labels[index], probabilities[index]] for index in order[:5]],
    }


@pytest.mark.parametrize(
    ("probabilities", "group", "label", "unsure"),
    [
        ([0.7, 0.1, 0.2], "dog", "poodle", False),
        # Of the three kinds the flower is the likeliest, but a dog is likelier still.
        ([0.3, 0.31, 0.39], "dog", "boxer", False),
        ([0.0, 0.0, 1.0], "flower", "tulip", False),
        ([0.25, 0.25, 0.5], "dog", "poodle", False),
        ([0.2, 0.2, 0.3], None, None, True),
        ([0.0, 0.0, 0.0], None, None, True),
    ],
)
def test_the_general_class_comes_first(
    probabilities: list[float], group: str | None, label: str | None, unsure: bool
) -> None:
    answer = DOGS.answer(np.array(probabilities, np.float32))
    assert (answer["group"], answer["label"], answer["unsure"]) == (group, label, unsure)


def test_a_class_may_be_known_and_its_kind_not() -> None:
    three = Recognition(labels=("a", "b", "c"), groups=("dog", "dog", "dog"))
    answer = three.answer(np.array([0.34, 0.33, 0.33]))
    assert (answer["group"], answer["label"], answer["unsure"]) == ("dog", None, False)
    assert answer["probability"] == 0.34


def test_without_groups_each_kind_is_a_class() -> None:
    answer = Recognition(labels=("a", "b")).answer(np.array([0.4, 0.6]))
    assert answer == {
        "label": "b",
        "group": "b",
        "probability": 0.6,
        "group_probability": 0.6,
        "unsure": False,
        "top": [["b", 0.6], ["a", 0.4]],
    }


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_the_shared_vectors(vector: dict[str, Any]) -> None:
    recognition = Recognition.from_json(vector["recognition"])
    assert recognition.to_json() == vector["recognition"]
    for case in vector["cases"]:
        assert recognition.answer(np.array(case["probabilities"])) == case["answer"]
        assert plainly(recognition, case["probabilities"]) == case["answer"]


def test_plain_python_says_the_same() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        count = int(random.integers(1, 40))
        groups = tuple(f"g{random.integers(0, 5)}" for _ in range(count))
        recognition = Recognition(
            labels=tuple(f"l{index}" for index in range(count)),
            groups=groups if random.random() < 0.7 else None,
            unsure_below=float(random.random()),
        )
        probabilities = random.dirichlet(np.full(count, 0.3)).astype(np.float32)
        if random.random() < 0.3:
            probabilities = np.round(probabilities, 1)
        assert recognition.answer(probabilities) == plainly(recognition, probabilities.astype(float).tolist())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"labels": ()}, "a tuple of different names"),
        ({"labels": ("a", "a")}, "a tuple of different names"),
        ({"labels": ["a"]}, "a tuple of different names"),
        ({"groups": ("dog",)}, "the general class of each of the 2 labels"),
        ({"unsure_below": 1.5}, "has unsure_below=1.5; it must be a probability"),
        ({"enter": True}, "has enter=True"),
        ({"leave": math.nan}, "has leave=nan"),
        ({"enter": 0.3, "leave": 0.4}, "leave=0.4 above enter=0.3"),
        ({"half_life_s": 0}, "half_life_s=0; it must be a number of seconds above 0"),
    ],
)
def test_a_wrong_declaration_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    changed: dict[str, Any] = {"labels": ("a", "b")} | fields
    with pytest.raises(ApplicationError, match=sentence):
        Recognition(**changed)


@pytest.mark.parametrize("wrong", [[0.5], [[0.5, 0.5, 0.0]], [0.5, math.nan, 0.5]])
def test_other_numbers_are_refused(wrong: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="one finite number for each of the 3 labels"):
        DOGS.answer(np.array(wrong))


@pytest.mark.parametrize("change", [{"more": 1}, {"labels": None}, {"enter": "high"}])
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BundleCorrupt, match="is not readable"):
        Recognition.from_json(DOGS.to_json() | change)
