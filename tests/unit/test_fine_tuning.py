"""Frozen parameters and rates by name: what is trained, what has state, statistics of batch norms, mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Optimizer, Schedule
from penstock.core.errors import TrainError
from penstock.train.overrides import declared_settings, parse_settings, with_overrides
from penstock.train.parallel.buckets import GradientBuckets
from penstock.train.recipe import ArraySet, CheckpointPolicy, Data, EMASettings, Recipe
from penstock.train.trainer import Trainer

X = torch.linspace(-3, 5, 48).reshape(12, 4).numpy()
Y = (torch.arange(12) % 3).numpy()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6, affine=False))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def recipe(**more: Any) -> Recipe:
    part = ArraySet(inputs=X, targets=Y)
    given: dict[str, Any] = {"optimizer": Optimizer("adamw", lr=0.01), "freeze": ["body"], "steps": 4, **more}
    return Recipe(
        data=lambda: Data(train=part, validation=part), loss=nn.functional.cross_entropy, batch_size=4, **given
    )


def trainer(made: Recipe) -> Trainer:
    return Trainer(network(), made, 4, inputs=X[:2])


def trained(made: Recipe, steps: int = 3) -> Trainer:
    own = trainer(made)
    for step in range(steps):
        own.step((torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])), step)
    return own


@pytest.mark.parametrize("pattern", ["body", "body.*", "bod?"])
def test_frozen_parameters_have_no_gradient_no_state_and_no_bucket(pattern: str) -> None:
    before = network().state_dict()
    own = trained(recipe(freeze=[pattern]))
    stepped = [weight for group in own.optimizer.param_groups for weight in group["params"]]
    head = list(own.module.get_submodule("head").parameters())
    assert {id(weight) for weight in stepped} == {id(weight) for weight in head} == set(map(id, own.optimizer.state))
    assert [id(each) for each in own.gradients._replicated] == [id(each) for each in head]  # pyright: ignore[reportPrivateUsage]
    assert isinstance(own.gradients, GradientBuckets)
    for name, tensor in own.module.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("body"), name
    assert all(weight.grad is None for weight in own.module.get_submodule("body").parameters())


def test_statistics_of_frozen_norms_are_kept_or_updated() -> None:
    for choice, kept in (("keep", True), ("update", False)):
        own = trained(recipe(frozen_statistics=choice))
        assert own.module.training
        for norm in ("body.1", "body.3"):
            layer = own.module.get_submodule(norm)
            assert layer.training != kept
            assert torch.equal(layer.get_buffer("running_mean"), torch.zeros(6)) == kept
    # A norm whose parameters are trained updates its statistics.
    own = trained(recipe(freeze=["body.0"]))
    assert own.module.get_submodule("body.1").training
    own.validate(ArraySet(inputs=X, targets=Y))
    own = trained(recipe())
    own.validate(ArraySet(inputs=X, targets=Y))
    own.step((torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])), 3)
    assert not own.module.get_submodule("body.1").training, "after a validation too"


def test_a_frozen_norm_takes_single_examples() -> None:
    with pytest.raises(TrainError, match="a single number for each channel"):
        Trainer(network(), single(freeze=()), 4, inputs=X[:2])
    Trainer(network(), single(freeze=["body"]), 4, inputs=X[:2])


def single(**more: Any) -> Recipe:
    part = ArraySet(inputs=X, targets=Y)
    return Recipe(
        data=lambda: Data(train=part, validation=part),
        loss=nn.functional.cross_entropy,
        optimizer=Optimizer("sgd", lr=0.1),
        batch_size=1,
        steps=1,
        **more,
    )


def test_rates_by_name_scale_the_groups_and_follow_the_schedule() -> None:
    made = recipe(freeze=(), lr_scale={"head": 10.0, "body.0.weight": 0.5}, schedule=Schedule("linear"))
    own = trainer(made)
    names = {id(weight): name for name, weight in own.module.named_parameters()}
    found = [([names[id(each)] for each in group["params"]], group["lr"]) for group in own.optimizer.param_groups]
    assert found == [
        (["body.0.bias", "body.1.weight", "body.1.bias"], 0.01),
        (["body.0.weight"], 0.005),
        (["head.weight", "head.bias"], pytest.approx(0.1)),
    ]
    own.step((torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])), 0)
    assert [group["lr"] for group in own.optimizer.param_groups] == pytest.approx([0.0075, 0.00375, 0.075])


def test_rates_by_name_are_those_of_groups_by_hand() -> None:
    def by_hand(named_parameters: Any) -> torch.optim.Optimizer:
        named = dict(named_parameters)
        head = [named.pop("head.weight"), named.pop("head.bias")]
        return torch.optim.SGD([{"params": list(named.values())}, {"params": head, "lr": 0.5}], lr=0.1)

    def hash_of(**given: Any) -> str:
        return penstock.fit(network(), (X, Y), steps=4, batch_size=4, device="cpu", quiet=True, **given).parameter_hash

    scaled = hash_of(optimizer=Optimizer("sgd", lr=0.1), lr_scale={"head.*": 5.0})
    assert scaled == hash_of(optimizer=by_hand)
    assert scaled != hash_of(optimizer=Optimizer("sgd", lr=0.1))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"freeze": ["bodi.*"]}, r"freeze has 'bodi.\*', which matches no parameter .*; the nearest are body"),
        ({"freeze": ["*"]}, r"freeze=\['\*'\] leaves no parameter to train"),
        ({"freeze": "body.*"}, "must be a list of patterns"),
        ({"lr_scale": {"heat": 2.0}}, "lr_scale has 'heat', which matches no parameter .*; the nearest are head"),
        ({"lr_scale": {"body": 2.0}}, "lr_scale has 'body', whose parameters are all frozen"),
        ({"lr_scale": {"head": 2.0, "head.bias": 3.0}}, "'head' and 'head.bias', which both match 'head.bias'"),
        ({"lr_scale": {"head": 0}}, "must be a number above 0"),
        ({"lr_scale": 2.0}, "give factors by patterns"),
        ({"frozen_statistics": "no"}, "choose one of keep, update"),
        (
            {
                "lr_scale": {"head": 2.0},
                "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(  # type: ignore[misc]
                    optimizer, 0.1, total_steps=steps + 1
                ),
            },
            "OneCycleLR sets the learning rate of every group",
        ),
    ],
)
def test_mistakes_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        trainer(recipe(**more))


def test_settings_freeze_and_scale() -> None:
    typed = ['freeze=["body.*"]', "lr_scale.head.*=3", "frozen_statistics=update"]
    made = with_overrides(recipe(freeze=()), parse_settings(typed))
    assert (made.freeze, made.lr_scale, made.frozen_statistics) == (["body.*"], {"head.*": 3}, "update")
    assert declared_settings(made)["lr_scale.head.*"] == 3
    assert declared_settings(made)["freeze"] == ["body.*"]
    assert with_overrides(made, {"lr_scale.head.*": None}).lr_scale == {}
    with pytest.raises(TrainError, match="of a recipe is no single value"):
        parse_settings(["lr_scale=3"])


@pytest.mark.thorough
def test_a_stopped_training_goes_on_exactly(tmp_path: Path) -> None:
    def fit(steps: int, out: Path) -> Any:
        return penstock.fit(
            network(),
            (X, Y),
            validation=(X, Y),
            optimizer=Optimizer("adamw", lr=0.01),
            freeze=["body"],
            lr_scale={"head.bias": 3.0},
            ema=EMASettings(decay=0.9),
            steps=steps,
            batch_size=4,
            device="cpu",
            quiet=True,
            out=out,
        )

    whole = fit(6, tmp_path / "whole")
    state = whole.network.state_dict()
    assert torch.equal(state["body.0.weight"], network().state_dict()["body.0.weight"])

    class Stops(penstock.Callback):
        def step(self, event: Any) -> None:
            if event.step == 3:
                raise KeyboardInterrupt

    given: dict[str, Any] = {"steps": 6, "batch_size": 4, "device": "cpu", "quiet": True, "out": tmp_path / "parts"}
    given |= {"freeze": ["body"], "lr_scale": {"head.bias": 3.0}, "ema": EMASettings(decay=0.9)}
    given |= {"optimizer": Optimizer("adamw", lr=0.01), "validation": (X, Y)}
    given["checkpoints"] = CheckpointPolicy(every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        penstock.fit(network(), (X, Y), callbacks=[Stops()], **given)
    assert penstock.fit(network(), (X, Y), **given).parameter_hash == whole.parameter_hash
