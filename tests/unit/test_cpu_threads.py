"""CPU threads of small networks are measured: the rule, what is not measured, and what the measurement leaves alone."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock import Optimizer
from penstock.train import cpu_threads
from penstock.train.cpu_threads import choose_threads, fewest_threads
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.trainer import Trainer

X, Y = torch.linspace(-1, 1, 64).reshape(16, 4).numpy(), (torch.arange(16) % 3).numpy()
PART = ArraySet(inputs=X, targets=Y)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.9, 4: 0.8}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.55}, 2),
        ({1: 1.0, 2: 0.9, 4: 0.5, 8: 2.0}, 4),
        ({1: 0.2, 8: 1.0}, 1),
    ],
)
def test_more_threads_must_pay(times: dict[int, float], chosen: int) -> None:
    assert fewest_threads(times) == chosen


def recipe(**more: Any) -> Recipe:
    given: dict[str, Any] = {"steps": 1000, "batch_size": 4, **more}
    return Recipe(
        data=lambda: Data(train=PART, validation=PART),
        loss=nn.functional.cross_entropy,
        optimizer=Optimizer("sgd", lr=0.1),
        **given,
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_choice_is_said_and_the_network_is_not_changed(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "SMALL_STEP_S", 0.0)
    monkeypatch.setattr(cpu_threads, "MAX_STEP_S", 10.0)
    own = network()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    found = choose_threads(own, recipe(), PART, World(), X[:2])
    assert found is not None
    assert found[0] in (1, 2)
    assert f"{found[0]} of 2 CPU threads: a step takes" in found[1]
    assert torch.get_num_threads() == 2
    assert all(tensor.equal(before[name]) for name, tensor in own.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in own.parameters())


def test_the_smallest_networks_take_one_without_trying_more(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "SMALL_STEP_S", 10.0)
    monkeypatch.setattr(cpu_threads, "MAX_STEP_S", 10.0)
    found = choose_threads(network(), recipe(), PART, World(), X[:2])
    assert found is not None
    assert found[0] == 1
    assert "with 2" not in found[1]


@pytest.mark.parametrize(("steps", "rounds"), [(20, 1), (200, 3)])
def test_short_trainings_are_measured_in_one_round(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, steps: int, rounds: int
) -> None:
    monkeypatch.setattr(cpu_threads, "SMALL_STEP_S", 0.0)
    monkeypatch.setattr(cpu_threads, "MAX_STEP_S", 10.0)
    # One step a round, and none is hopeless.
    monkeypatch.setattr(cpu_threads, "HOPELESS", 1e9)
    monkeypatch.setattr(cpu_threads, "STEPS_A_ROUND", 1)
    taken: list[int] = []
    step = Trainer.step

    def counted(trainer: Trainer, *given: Any) -> Any:
        taken.append(torch.get_num_threads())
        return step(trainer, *given)

    monkeypatch.setattr(Trainer, "step", counted)
    assert choose_threads(network(), recipe(steps=steps), PART, World(), X[:2]) is not None
    assert taken == [1] * 2 * rounds + [2] * rounds


@pytest.mark.parametrize(
    "more", [{"steps": 19}, {"execution": StepExecution(threads=2)}, {"batch_size": 32}], ids=["short", "given", "few"]
)
def test_what_is_not_measured(two_threads: None, more: dict[str, Any]) -> None:
    assert choose_threads(network(), recipe(**more), PART, World(), X[:2]) is None


def test_large_networks_are_not_measured(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "MAX_STEP_S", 0.0)
    assert choose_threads(network(), recipe(), PART, World(), X[:2]) is None
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(cpu_threads, "MAX_PARAMETERS", 1)
    assert choose_threads(network(), recipe(), PART, World(), X[:2]) is None
