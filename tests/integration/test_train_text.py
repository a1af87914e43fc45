"""A text classifier with token ids and a mask of varying length: trained, resumed, on two processes, and loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from tests.support.text_classifier import APPLICATION
from tests.support.training import fields, penstock_run

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 3, 7, 20, 39, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text")
    (made / "app.py").write_text(APPLICATION)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    done = penstock_run("train", "app.py", "--out", "run", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def text_of(length: int, kind: int) -> dict[str, Any]:
    """Make a text in which most tokens are of one kind."""
    rng = np.random.default_rng(length)
    kinds = np.where(np.arange(length) < length // 2 + 1, kind, rng.integers(0, 3, length))
    ids = 3 * rng.integers(1, 9, length) + kinds
    return {"input_ids": rng.permutation(ids), "attention_mask": np.ones(length, np.int64)}


def test_a_trained_text_classifier_is_right_on_every_length(run: Path) -> None:
    assert fields(run)["metrics"]["accuracy"] > 0.97
    predictor = penstock.load(run / "bundle")
    texts = [text_of(length, kind) for length in LENGTHS for kind in range(3)]
    answers = predictor.predict(texts)
    for text, answer in zip(texts, answers, strict=True):
        kinds = text["input_ids"] % 3
        assert answer["tags"].shape == (len(kinds), 3)
        assert (answer["tags"].argmax(1) == kinds).mean() >= 0.9
        assert answer["logits"].argmax() == np.bincount(kinds, minlength=3).argmax()
        alone = predictor.predict(text)
        np.testing.assert_allclose(alone["logits"], answer["logits"], atol=1e-4)


def test_golden_examples_are_the_shortest_the_longest_and_some_between(run: Path) -> None:
    files = penstock.Bundle.open(run / "bundle").files
    lengths = sorted(files.golden.inputs["tokens"].tolist())
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 40, 32)
    assert len(set(lengths)) > 15


def test_a_resumed_run_ends_exactly_as_an_undisturbed_one(folder: Path, run: Path) -> None:
    stopped = folder / "stopped"
    # As if it had been killed before its last checkpoint.
    first, last = sorted(each.name for each in (run / "checkpoints").iterdir())[-2:]
    assert first < last
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("bundle", last))
    done = penstock_run("train", "--resume", "stopped", folder=folder)
    assert done.returncode == 0, done.stderr
    assert fields(stopped)["parameter_hash"] == fields(run)["parameter_hash"]


def test_two_processes_learn_and_validate_as_one(folder: Path) -> None:
    for name, more in (("one", ()), ("two", ("--processes", "2"))):
        done = penstock_run("train", "app.py", "--out", name, "--steps", "30", *more, folder=folder)
        assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for alone, together in zip(one, two, strict=True):
        for name in ("train_loss", "validation_loss", "validation_tag_accuracy"):
            assert together[name] == pytest.approx(alone[name], rel=1e-3)
