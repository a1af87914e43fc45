"""A step captured in a CUDA graph: the bits of the same step launched operation by operation."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.numerics import numerics
from penstock.train.overrides import with_overrides
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, EMASettings, Recipe, StepExecution
from penstock.train.step.capturable_optimizer import ELEMENTWISE
from penstock.train.step.cuda_graph import EAGER_STEPS
from penstock.train.step.schedules import warm_up_cosine
from penstock.train.trainer import Trainer

pytestmark = pytest.mark.gpu


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3)


def described(changes: dict[str, Any]) -> str:
    """A name that is the same in each process of xdist."""
    return ", ".join(f"{name} {getattr(value, '__name__', value)}" for name, value in changes.items()) or "nothing"


STEPS, BATCH = 12, 16
NOTHING = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
INPUTS = np.random.default_rng(0).integers(0, 256, (STEPS, BATCH, 3, 16, 16)).astype(np.float32) / 255
LABELS = np.random.default_rng(1).integers(0, 10, (STEPS, BATCH))


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        norm(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16 * 64, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def recipe(**changes: Any) -> Recipe:
    made = Recipe(
        data=lambda: Data(train=NOTHING, validation=NOTHING),
        loss=CrossEntropy(0.1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
        schedule=warm_up_cosine(),
        batch_size=BATCH,
        steps=STEPS,
    )
    return with_overrides(made, changes)


def made(module: nn.Module, asked: Recipe) -> Trainer:
    trainer = Trainer(module, asked, STEPS, World(device=torch.device("cuda")), inputs=INPUTS[0])
    trainer.notify = pytest.fail
    return trainer


def steps(trainer: Trainer, of: range) -> list[Tensor]:
    return [trainer.step((torch.from_numpy(INPUTS[step]), torch.from_numpy(LABELS[step])), step) for step in of]


def ends(asked: Recipe, dropout: float = 0.3) -> tuple[Trainer, Tensor]:
    with numerics(asked):
        trainer = made(network(dropout=dropout), asked)
        losses = steps(trainer, range(STEPS))
        state = [tensor.double().flatten() for tensor in trainer.module.state_dict().values()]
        return trainer, torch.cat([torch.stack(losses).double(), *state]).cpu()


# Torch's compiler warns of what it does itself.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": adamw},
        {"optimizer": rmsprop},
        {"execution.accumulation_steps": 4, "clip_norm": 0.5, "ema": EMASettings(decay=0.9)},
        {"precision": "bf16"},
        {"precision": "bf16", "execution.master_weights": True},
        {
            "precision": "bf16",
            "execution.master_weights": True,
            "optimizer": adamw,
        },
        {"precision": "bf16", "execution.master_weights": True, "execution.compile": True},
        {"precision": "fp16"},
        {"precision": "fp16", "optimizer": adamw},
        {"precision": "tf32"},
        {"execution.compile": True},
    ],
    ids=described,
)
def test_a_captured_step_is_the_step(changes: dict[str, Any]) -> None:
    captured, found = ends(recipe(**changes))
    assert captured.steps.is_captured
    launched, expected = ends(recipe(**changes, **{"execution.graph": False}))
    assert not launched.steps.is_captured
    assert found.isfinite().all()
    assert torch.equal(found, expected)


class Recurrent(nn.Module):
    """Has weights that lie in one piece of memory, where not each begins at a whole vector."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(16, 50, batch_first=True), nn.Linear(50, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.body(x_BCHW[:, 0])[1][0])


def test_weights_that_begin_anywhere_are_stepped() -> None:
    states: list[Tensor] = []
    for working in (True, False):
        asked = recipe(precision="bf16", execution=StepExecution(master_weights=working), schedule=None)
        with numerics(asked):
            torch.manual_seed(0)
            trainer = made(Recurrent(), asked)
            steps(trainer, range(STEPS))
            states.append(torch.cat([weight.detach().flatten() for weight in trainer.module.parameters()]))
    torch.testing.assert_close(*states, rtol=1e-2, atol=1e-3)


def test_precisions_agree_about_what_is_learned() -> None:
    # What drops out is drawn otherwise for other types.
    _, exact = ends(recipe(), dropout=0.0)
    for precision, most in (("tf32", 0.02), ("bf16", 0.05), ("fp16", 0.05)):
        _, found = ends(recipe(precision=precision), dropout=0.0)
        assert (found[:STEPS] - exact[:STEPS]).abs().max() < most, precision


def test_a_step_that_overflows_is_left_out() -> None:
    asked = recipe(precision="fp16", schedule=None)
    with numerics(asked):
        trainer = made(network(), asked)
        for step in range(EAGER_STEPS + 6):
            before = [parameter.detach().clone() for parameter in trainer.module.parameters()]
            overflows = step in (0, 1, EAGER_STEPS + 2)
            inputs = torch.full((BATCH, 3, 16, 16), 1e30) if overflows else torch.from_numpy(INPUTS[step])
            trainer.step((inputs, torch.from_numpy(LABELS[step])), step)
            after = list(trainer.module.parameters())
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) == overflows
            for state in trainer.optimizer.state.values():
                assert state["momentum_buffer"].abs().max() < 100
        assert trainer.steps.is_captured


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_of_torch_steps_as_it_does_on_the_cpu(name: str) -> None:
    asked = recipe(optimizer=lambda parameters: getattr(torch.optim, name)(parameters, lr=1e-3), schedule=None)
    with numerics(asked):
        trainer = Trainer(network(dropout=0.0), asked, STEPS, World(device=torch.device("cuda")), inputs=INPUTS[0])
        found = torch.stack(steps(trainer, range(STEPS))).cpu()
        on_cpu = Trainer(network(dropout=0.0), asked, STEPS, World(), inputs=INPUTS[0])
        expected = torch.stack(steps(on_cpu, range(STEPS)))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


class Draws(nn.Module):
    """Draws on the host."""

    def forward(self, given: Tensor) -> Tensor:
        return given * random.random()


def test_chance_of_the_host_is_not_captured() -> None:
    said: list[str] = []
    asked = recipe()
    with numerics(asked):
        trainer = Trainer(
            nn.Sequential(Draws(), network()), asked, STEPS, World(device=torch.device("cuda")), inputs=INPUTS[0]
        )
        trainer.notify = said.append
        assert torch.stack(steps(trainer, range(STEPS))).isfinite().all()
    assert not trainer.steps.is_captured
    assert "draws random numbers on the host" in said[0]


def test_after_a_capture_that_failed_memory_comes_back() -> None:
    asked = recipe()
    stream = torch.cuda.current_stream()
    with numerics(asked):
        module = network(lambda channels: nn.BatchNorm2d(channels, momentum=None))
        trainer = Trainer(module, asked, STEPS, World(device=torch.device("cuda")), inputs=INPUTS[0])
        steps(trainer, range(EAGER_STEPS + 1))
        assert trainer.steps.why_eager
        assert torch.cuda.current_stream() == stream
        side, held = torch.cuda.Stream(), []
        for _ in range(20):
            with torch.cuda.stream(side):
                batch = torch.zeros(1 << 24, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            del batch
    assert held[-1] == held[2]


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path: Any) -> None:
    asked = recipe(ema=EMASettings(decay=0.9))
    _, whole = ends(asked)
    with numerics(asked):
        first = made(network(), asked)
        early = steps(first, range(7))
        with Saver(tmp_path, first.world) as saver:
            save_checkpoint(saver, first, History(step=7))
        second = made(network(), asked)
        checkpoint = newest_checkpoint(tmp_path)
        assert checkpoint is not None
        restore_checkpoint(checkpoint, second)
        late = steps(second, range(7, STEPS))
        state = [tensor.double().flatten() for tensor in second.module.state_dict().values()]
        found = torch.cat([torch.stack([*early, *late]).double(), *state]).cpu()
    assert torch.equal(found, whole)


class Refuses(nn.BatchNorm2d):
    """Raises where it is captured, before the device is asked for what it cannot do."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("it is not to be captured")
        return super().forward(input)


@pytest.mark.parametrize(
    ("changes", "norm", "why"),
    [
        ({"execution.graph": False}, nn.BatchNorm2d, ""),
        ({}, Refuses, "it is not to be captured"),
        ({}, lambda channels: nn.BatchNorm2d(channels, momentum=None), "captur"),
        (
            {"schedule": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps)},
            nn.BatchNorm2d,
            "the schedule changes more than learning rates",
        ),
    ],
)
def test_what_cannot_be_captured_is_launched_and_says_why(changes: dict[str, Any], norm: Any, why: str) -> None:
    asked, said = recipe(**changes), []
    with numerics(asked):
        trainer = Trainer(network(norm), asked, STEPS, World(device=torch.device("cuda")), inputs=INPUTS[0])
        trainer.notify = said.append
        losses = torch.stack(steps(trainer, range(STEPS)))
    assert losses.isfinite().all()
    assert not trainer.steps.is_captured
    assert [why in sentence for sentence in said] == ([True] if why else [])
