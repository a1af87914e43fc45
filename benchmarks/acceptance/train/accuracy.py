"""Accuracy of the three applications after training as a user trains them, one figure for each seed."""

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.acceptance.train.training_run import SEEDS, trained

TRAIN_S = 300
IMAGE_CORES = 2
KEYWORD_ROWS = 64


def digits_accuracy() -> list[float]:
    """Return the held-out accuracy."""
    return [run["metrics"]["test_accuracy"] for run in _digits_runs()]


def digits_train_seconds() -> list[float]:
    """Return the wall time of the training, in seconds."""
    return [run["seconds"] for run in _digits_runs()]


def images_accuracy() -> list[float]:
    """Return the share of held-out views whose top label is right, by the served bundle."""
    return [_with_seed("images", seed, TRAIN_S * IMAGE_CORES, held_out_accuracy) for seed in SEEDS]


def keywords_word_error() -> list[float]:
    """Return the word error on the test voices, streamed in chunks of 80 ms."""
    return [_with_seed("keywords", seed, TRAIN_S, streamed_word_error) for seed in SEEDS]


def held_out_accuracy(bundle: Path) -> float:
    """Return the share of the held-out views that a bundle classifies rightly."""
    from penstock.apps.images.photographs import test_views
    from penstock.runtime.load import load

    test = test_views()
    predicted = load(bundle).predict(test.inputs.astype("float32")).argmax(1)
    return float((predicted == test.targets).mean())


def streamed_word_error(bundle: Path) -> float:
    """Return the word error of a bundle on the test voices, by the streaming executor that serves it."""
    import torch

    from penstock.apps.keywords.recipe import keywords, word_error
    from penstock.runtime.load import load, streaming_executor
    from penstock.runtime.whole_signals import run_in_chunks
    from penstock.train.data.examples import ArraySet

    predictor = load(bundle)
    executor = streaming_executor(predictor.application, predictor.module, slots=KEYWORD_ROWS, max_rows=KEYWORD_ROWS)
    test = keywords().test
    assert isinstance(test, ArraySet)
    return word_error(torch.from_numpy(run_in_chunks(executor, test.inputs)), torch.from_numpy(test.targets))


def _with_seed(application: str, seed: int, limit_cpu_s: float, score: Any) -> float:
    with trained(application, "--seed", str(seed), limit_cpu_s=limit_cpu_s) as run:
        return score(run.bundle)


@cache
def _digits_runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        with trained("digits", "--seed", str(seed)) as run:
            runs.append(run.fields)
    return runs
