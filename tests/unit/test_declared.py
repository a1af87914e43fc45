"""Optimizers and schedules that are declared by name: the same as torch's, settings that reach them, mistakes."""

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import Optimizer, Schedule
from penstock.core.errors import TrainError
from penstock.train.overrides import declared_settings, parse_settings, with_overrides
from penstock.train.recipe import Data, Recipe
from penstock.train.step.optimizers import LAMB
from penstock.train.step.schedules import warm_up_cosine, warm_up_steps

X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = torch.arange(12) % 3


def no_data() -> Data:
    raise AssertionError("no data are read")


def recipe(**more: Any) -> Recipe:
    given: dict[str, Any] = {"optimizer": Optimizer("sgd", lr=0.1, momentum=0.9), **more}
    return Recipe(data=no_data, loss=nn.CrossEntropyLoss(), epochs=2, **given)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))


def hash_of(optimizer: Any, schedule: Any = None) -> str:
    fitted = penstock.fit(
        network(), (X, Y), optimizer=optimizer, schedule=schedule, epochs=3, batch_size=4, device="cpu", quiet=True
    )
    return fitted.parameter_hash


@pytest.mark.parametrize("name", [name for name in Optimizer.names() if name != "sparseadam"])
def test_every_optimizer_trains(name: str) -> None:
    before = torch.cat([weight.flatten() for weight in network().parameters()])
    fitted = penstock.fit(
        network(), (X, Y), optimizer=Optimizer(name, lr=0.01), steps=2, device="cpu", quiet=True, batch_size=4
    )
    after = torch.cat([weight.detach().flatten() for weight in fitted.network.parameters()])
    assert after.isfinite().all()
    assert not torch.equal(before, after)


def test_a_declared_optimizer_is_torchs() -> None:
    torchs = torch.optim
    assert hash_of(Optimizer("SGD", lr=0.1, momentum=0.9)) == hash_of(partial(torchs.SGD, lr=0.1, momentum=0.9))
    assert hash_of(Optimizer("adamw", betas=[0.8, 0.9])) == hash_of(partial(torchs.AdamW, betas=(0.8, 0.9)))
    assert hash_of(Optimizer("lamb", lr=0.1)) == hash_of(partial(LAMB, lr=0.1))
    assert hash_of(Optimizer("sgd", lr=0.1)) != hash_of(Optimizer("sgd", lr=0.2))


def test_groups_are_declared_too() -> None:
    named = list(network().named_parameters())
    groups = Optimizer("adamw", lr=0.1, weight_decay=0.5, decay_vectors=False)(named).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.5), (4, 0.0)]
    groups = Optimizer("adamw", lr=16.0, weight_decay=0.5, layer_decay=0.5)(named).param_groups
    assert [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups] == [
        (2, 16.0, 0.5),
        (2, 8.0, 0.5),
        (2, 4.0, 0.5),
    ]


def rates(schedule: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    made, found = schedule(optimizer, steps), []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        made.step()
    return found


def test_declared_schedules() -> None:
    assert rates(Schedule("cosine", warmup=0.1, last=0.2)) == rates(warm_up_cosine(0.1, 0.2))
    assert rates(Schedule("step", warmup=0.2)) == rates(warm_up_steps(0.2))
    assert rates(Schedule("cosine", warmup_steps=2)) == rates(Schedule("cosine", warmup=0.1))
    assert rates(Schedule("constant", warmup_steps=4)) == [0.25, 0.5, 0.75, *[1.0] * 17]
    linear = rates(Schedule("linear", last=0.5))
    assert linear == pytest.approx([1 - 0.5 * step / 20 for step in range(20)])
    cycle = rates(Schedule("one-cycle", warmup=0.5, first=0.2, last=0.0))
    assert cycle[0] == pytest.approx(0.2)
    assert max(cycle) == cycle[10] == 1.0
    assert cycle[5] == pytest.approx(0.6)
    assert cycle[15] == pytest.approx((1 + math.cos(math.pi / 2)) / 2)


def test_settings_reach_names_and_arguments() -> None:
    given = parse_settings(
        ["optimizer.lr=0.01", "optimizer.name=adamw", "schedule.warmup_steps=5", "schedule.name=cosine"]
    )
    made = with_overrides(recipe(), given)
    # SGD's momentum is not one of AdamW.
    assert made.optimizer == Optimizer("adamw", lr=0.01)
    assert made.schedule == Schedule("cosine", warmup_steps=5)
    made = with_overrides(recipe(schedule=Schedule("cosine", warmup=0.1)), {"schedule.warmup_steps": 3})
    assert made.schedule == Schedule("cosine", warmup_steps=3)
    assert with_overrides(recipe(), {"optimizer.momentum": None}).optimizer == Optimizer("sgd", lr=0.1)
    assert declared_settings(recipe(schedule=Schedule("step", at=(0.5,)))) == {
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.momentum": 0.9,
        "schedule.name": "step",
        "schedule.at": [0.5],
    }
    assert declared_settings(recipe(optimizer=partial(torch.optim.SGD, lr=0.5))) == {"optimizer.lr": 0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer.momentun": 0.9}, "no setting 'optimizer.momentun'; the nearest are optimizer.momentum"),
        ({"lr": 3}, "no setting 'lr'; the nearest are optimizer.lr"),
        ({"optim.lr": 3}, "no setting 'optim.lr'; the nearest are optimizer.lr"),
        ({"momentun": 0.9}, "no setting 'momentun'; the nearest are optimizer.momentum"),
        ({"optimizer.name": "adamx"}, "no optimizer 'adamx'; the nearest are adam"),
        ({"optimizer.name": "adamw", "optimizer.momentum": 0.9}, "no setting 'optimizer.momentum'"),
        ({"optimizer.lr": "fast"}, "the optimizer 'sgd' has lr 'fast'; it must be a number"),
        ({"optimizer.nesterov": 1}, "has nesterov 1; it must be true or false"),
        ({"optimizer.layer_decay": 2}, "layer_decay 2; it must be above 0 and at most 1"),
        ({"schedule.warmup_steps": 3}, "set schedule.name first"),
        ({"schedule.name": "cosin"}, "no schedule 'cosin'; the nearest are cosine"),
        ({"schedule.name": "cosine", "schedule.warmup": 2}, "warmup 2; it must be a share"),
        ({"schedule.name": "cosine", "schedule.at": [0.5]}, "no setting 'schedule.at'"),
        ({"schedule.name": "constant", "schedule.warmup_steps": 1.5}, "warmup_steps 1.5; it must be a whole number"),
        ({"schedule.name": "step", "schedule.at": ["x"]}, "it must be a list of numbers"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        with_overrides(recipe(), settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer("sdg", lr=1), "no optimizer 'sdg'; the nearest are sgd"),
        (lambda: Optimizer("lbfgs"), "no optimizer 'lbfgs'"),
        (lambda: Optimizer("sgd", rate=1), "'sgd' has no argument 'rate'"),
        (lambda: Optimizer("sgd", momentun=1), "has no argument 'momentun'; the nearest are momentum"),
        (lambda: Optimizer("lamb"), "needs lr"),
        (lambda: Optimizer("muon", others="head"), "others 'head'; it must be a list of words"),
        (lambda: Schedule("cosine", warmup=0.1, warmup_steps=3), "give one of them"),
        (lambda: Schedule("cosine", warm_up=0.1), "has no argument 'warm_up'; the nearest are warmup"),
        (lambda: Schedule("step", factor=0), "factor 0; it must be above 0"),
        (
            lambda: hash_of(Optimizer("sgd", lr=-1)),
            r"Optimizer\('sgd', lr=-1\) cannot be made: Invalid learning rate: -1",
        ),
        (lambda: hash_of(Optimizer("muon", momentum=1.0)), "Muon has momentum 1.0"),
    ],
)
def test_mistakes_in_a_declaration_are_named(make: Any, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        make()


def test_declarations_are_values() -> None:
    one = Optimizer("sgd", lr=0.1, momentum=0.9)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(one) == "Optimizer('sgd', lr=0.1, momentum=0.9)"
    assert len({one, Optimizer("sgd", lr=0.1, momentum=0.9), Optimizer("sgd", lr=0.2)}) == 2
    with pytest.raises(AttributeError, match="immutable"):
        one.name = "adam"


def test_a_stopped_training_goes_on_with_a_declared_schedule(tmp_path: Path) -> None:
    def fit(steps: int, out: Path) -> str:
        return penstock.fit(
            network(),
            (X, Y),
            optimizer=Optimizer("adamw", lr=0.01),
            schedule=Schedule("constant", warmup_steps=4),
            steps=steps,
            batch_size=4,
            device="cpu",
            quiet=True,
            out=out,
        ).parameter_hash

    whole = fit(8, tmp_path / "whole")
    assert fit(8, tmp_path / "whole") == whole
    with pytest.raises(TrainError, match=r"optimizer.lr|steps"):
        fit(9, tmp_path / "whole")
