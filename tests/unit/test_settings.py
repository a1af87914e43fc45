"""Settings of a recipe by name: what they reach, how they are typed, and mistakes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from penstock.core.errors import TrainError
from penstock.train.overrides import parse_settings, read_settings, with_overrides
from penstock.train.recipe import Data, EMASettings, Recipe
from penstock.train.step.schedules import warm_up_cosine


def no_data() -> Data:
    raise AssertionError("no data are read")


RECIPE = Recipe(
    data=no_data,
    loss=partial(F.cross_entropy, label_smoothing=0.1),
    optimizer=partial(AdamW, lr=1e-3, weight_decay=0.01),
    schedule=warm_up_cosine(0.1),
    epochs=3,
)


def test_arguments_of_the_optimizer_the_schedule_and_the_loss_are_settings() -> None:
    made = with_overrides(
        RECIPE, {"optimizer.lr": 0.5, "optimizer.eps": 1e-6, "schedule.last": 0.25, "loss.label_smoothing": 0.0}
    )
    optimizer: Any = made.optimizer([nn.Parameter(torch.zeros(2))])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (0.5, 1e-6, 0.01)
    assert made.schedule is not None
    schedule = made.schedule(optimizer, 10)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)
    loss: Any = made.loss
    assert loss.keywords == {"label_smoothing": 0.0}
    assert isinstance(RECIPE.optimizer, partial)
    assert RECIPE.optimizer.keywords["lr"] == 1e-3, "the recipe itself is not changed"


def test_records_in_a_recipe_are_reached_too() -> None:
    made = with_overrides(RECIPE, {"execution.threads": 2, "ema.decay": 0.9, "steps": 7})
    assert (made.execution.threads, made.ema, made.steps, made.epochs) == (2, EMASettings(decay=0.9), 7, None)


def test_settings_are_toml_values_or_words(tmp_path: Path) -> None:
    typed = ["optimizer.lr=1e-2", "precision=bf16", "clip_norm=none", "execution.graph=false", 'x="3"', "at=[1, 2]"]
    assert parse_settings(typed) == {
        "optimizer.lr": 0.01,
        "precision": "bf16",
        "clip_norm": None,
        "execution.graph": False,
        "x": "3",
        "at": [1, 2],
    }
    file = tmp_path / "recipe.toml"
    file.write_text("epochs = 5\n[optimizer]\nlr = 0.01\n[execution]\nthreads = 1\n")
    assert read_settings(file) == {"epochs": 5, "optimizer.lr": 0.01, "execution.threads": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser.lr": 1}, "no setting 'optimiser.lr'; the nearest are optimizer.lr"),
        ({"optimizer.rate": 1}, "no setting 'optimizer.rate'; the nearest are optimizer"),
        ({"epoch": 1}, "no setting 'epoch'; the nearest are epochs"),
        ({"seed.more": 1}, "'seed' of the recipe is of type int and has no settings"),
        ({"ema.warm_up": True}, "set ema.decay first"),
        ({"clip_norm": -1}, "clip_norm -1"),
        ({"epochs": "abc"}, "epochs is 'abc'; it must be a number"),
        ({"steps": 7.5}, "steps is 7.5; it must be a whole number or none"),
        ({"steps": True}, "steps is True; it must be a whole number or none"),
        ({"batch_size": True}, "batch_size is True; it must be a whole number"),
        ({"execution.graph": "maybe"}, "execution.graph is 'maybe'; it must be true or false"),
        ({"execution.threads": 1.5}, "execution.threads is 1.5; it must be a whole number or none"),
        ({"optimizer.lr": "fast"}, "optimizer.lr is 'fast'; it must be a number"),
        ({"ema.decay": "x"}, "ema.decay is 'x'; it must be a number"),
        ({"precision": "fp8"}, "precision 'fp8'"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        with_overrides(RECIPE, settings)


def test_an_optimizer_that_is_a_plain_function_has_no_settings() -> None:
    recipe = with_overrides(RECIPE, {"optimizer": lambda parameters: SGD(parameters, lr=0.1)})
    with pytest.raises(
        TrainError, match=r"'optimizer' of the recipe is of type function and has no settings; a declared"
    ):
        with_overrides(recipe, {"optimizer.lr": 1})


@pytest.mark.parametrize("text", ["lr", "=3", "lr=", " =1"])
def test_what_is_typed_wrong_is_shown(text: str) -> None:
    with pytest.raises(TrainError, match="write NAME=VALUE"):
        parse_settings([text])


def test_functions_and_broken_files_are_refused(tmp_path: Path) -> None:
    for text in ("optimizer=adam", "ema=0.9", "selection=1", "execution=3"):
        with pytest.raises(TrainError, match="of a recipe is no single value"):
            parse_settings([text])
    for text in ("optimizer.lr=2024-01-01", "optimizer.momentum=nan"):
        with pytest.raises(TrainError, match="a setting is a number, true, false"):
            parse_settings([text])
    file = tmp_path / "broken.toml"
    file.write_text("epochs = = 5")
    with pytest.raises(TrainError, match="is not TOML"):
        read_settings(file)
    with pytest.raises(TrainError, match="cannot be read"):
        read_settings(tmp_path / "none.toml")
