"""LARS and LAMB: the papers' steps, left out where told, by rates on the device, over parts as over whole weights."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.tensor_parallel import WeightSlice
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.step.capturable_optimizer import CapturableOptimizer, check_optimizer
from penstock.train.step.optimizers import LAMB, LARS, Layerwise
from penstock.train.trainer import Trainer

Make = Callable[..., Layerwise]
Reference = Callable[[list[Tensor], list[Tensor], dict[str, Any], int], None]
EACH = pytest.mark.parametrize("make", [LARS, LAMB])
RATE: dict[Any, float] = {LARS: 2.0, LAMB: 0.02}


def lars(weights: list[Tensor], grads: list[Tensor], kept: dict[str, Any], step: int) -> None:
    """As in the paper, one weight after the other."""
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        decay, ratio = 5e-4, 1.0
        if weight.ndim < 2:
            decay = 0.0
        elif weight.norm() > 0 and grad.norm() > 0:
            ratio = 1e-3 * weight.norm() / (grad.norm() + decay * weight.norm())
        velocity = 0.9 * kept.get(f"v{index}", 0.0) + RATE[LARS] * ratio * (grad + decay * weight)
        kept[f"v{index}"] = velocity
        weight -= velocity


def lamb(weights: list[Tensor], grads: list[Tensor], kept: dict[str, Any], step: int) -> None:
    """As in the paper, one weight after the other."""
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        mean = kept[f"m{index}"] = 0.9 * kept.get(f"m{index}", 0.0) + 0.1 * grad
        square = kept[f"s{index}"] = 0.999 * kept.get(f"s{index}", 0.0) + 0.001 * grad**2
        direction = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
        ratio = 1.0
        if weight.ndim >= 2:
            direction = direction + 0.01 * weight
            if weight.norm() > 0 and direction.norm() > 0:
                ratio = weight.norm() / direction.norm()
        weight -= RATE[LAMB] * ratio * direction


def weights_of(seed: int = 0) -> list[nn.Parameter]:
    """A convolution that lies channels_last, a matrix, a bias, a single number, and a matrix that is zero."""
    torch.manual_seed(seed)
    convolution = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    made = [convolution, torch.randn(5, 6), torch.randn(6), torch.randn(()), torch.zeros(3, 4)]
    return [nn.Parameter(tensor) for tensor in made]


def give(weights: list[nn.Parameter], step: int) -> list[Tensor]:
    """Gradients of a step; the last weight has none in the first one, and the third is zero in the second."""
    generator = torch.Generator().manual_seed(step)
    for index, weight in enumerate(weights):
        grad = torch.randn(weight.shape, generator=generator) * (index != 2 or step != 2)
        weight.grad = torch.empty_like(weight).copy_(grad)
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize(("make", "reference"), [(LARS, lars), (LAMB, lamb)])
def test_steps_are_the_papers(make: Make, reference: Reference) -> None:
    weights = weights_of()
    exact, kept = [weight.detach().double() for weight in weights], {}
    optimizer = make(weights, lr=RATE[make])
    for step in range(1, 6):
        grads = give(weights, step)
        reference(exact, [grad.double() for grad in grads], kept, step)
        optimizer.step()
        for weight, right in zip(weights, exact, strict=True):
            torch.testing.assert_close(weight.double(), right, rtol=2e-6, atol=1e-7)
    assert weights[4].count_nonzero() == 12


@EACH
def test_in_float64_they_are_exact_and_groups_have_settings_of_their_own(make: Make) -> None:
    one, other = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64) * index) for index in (1, 2)]
    optimizer = make([{"params": [one], "weight_decay": 0.0}, {"params": [other], "lr": 0.0}], lr=0.5)
    for weight in (one, other):
        weight.grad = torch.full_like(weight, 0.25)
    optimizer.step()
    assert torch.equal(other, torch.full_like(other, 2.0))
    # The direction is even, so that only its length counts: trust * |w| of LARS, |w| of LAMB.
    length = 0.5 * 2 * (1e-3 if make is LARS else 1.0)
    torch.testing.assert_close((1 - one).norm(), torch.tensor(length, dtype=torch.float64), rtol=1e-12, atol=0)


@EACH
def test_vectors_can_be_adapted_like_all_else(make: Make) -> None:
    moved: list[float] = []
    for excluded in (True, False):
        weight = nn.Parameter(torch.full((4,), 3.0))
        optimizer = make([weight], lr=0.1, exclude_vectors=excluded, weight_decay=0.0)
        weight.grad = torch.full((4,), 7.0)
        optimizer.step()
        moved.append((3.0 - weight[0]).item())
    # By the gradient or by Adam's direction; by the share of the weight.
    expected = [0.7, 0.1 * 1e-3 * 3.0] if make is LARS else [0.1, 0.1 * 3.0]
    assert moved == pytest.approx(expected, rel=1e-3)


@EACH
def test_a_rate_on_the_device_gives_the_same_bits_as_a_number(make: Make) -> None:
    ends: list[list[Tensor]] = []
    for as_tensor in (False, True):
        weights = weights_of()
        optimizer = make(weights, lr=0.3)
        for step in range(1, 5):
            give(weights, step)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.3 / step) if as_tensor else 0.3 / step
            optimizer.step()
        ends.append([weight.detach() for weight in weights])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@EACH
def test_a_step_whose_gradients_overflowed_leaves_everything_as_it_is(make: Make) -> None:
    weights, undisturbed = weights_of(), weights_of()
    optimizer, other = make(weights, lr=0.1), make(undisturbed, lr=0.1)
    stepper = CapturableOptimizer(optimizer, torch.device("cpu"), skips=True)
    for step, overflows in enumerate((True, False, True, False, True), 1):
        give(weights, step)
        if overflows:
            assert weights[0].grad is not None
            weights[0].grad[0] = torch.inf
            assert weights[1].grad is not None
            weights[1].grad[:] = torch.nan
        before = copy.deepcopy((list(weights), optimizer.state_dict()["state"]))
        stepper.step(torch.tensor(1.0 if overflows else 0.0))
        if overflows:
            assert all(torch.equal(weight, was) for weight, was in zip(weights, before[0], strict=True))
            state = optimizer.state_dict()["state"]
            for index, values in before[1].items():
                assert all(torch.equal(state[index][name], value) for name, value in values.items())
        else:
            give(undisturbed, step)
            other.step()
            for weight, right in zip(weights, undisturbed, strict=True):
                torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-8)


@EACH
def test_nothing_is_read_by_the_host(make: Make) -> None:
    # Of tensors on "meta" there is nothing to read.
    weights = [nn.Parameter(torch.empty(3, 4, device="meta")), nn.Parameter(torch.empty(3, device="meta"))]
    optimizer = make(weights, lr=0.1)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.found_inf = torch.zeros((), device="meta")
        optimizer.param_groups[0]["lr"] = torch.zeros((), device="meta")
        optimizer.step()
    kept = [value for values in optimizer.state.values() for value in values.values()]
    assert len(kept) == (2 if make is LARS else 6)
    assert all(value.is_meta for value in kept)


class Together:
    """Sums over the optimizers of two threads, as if they were processes."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)
        self.given: dict[int, Tensor] = {}
        self.sums = 0

    def total(self, rank: int) -> Callable[[Tensor], Tensor]:
        def summed(own: Tensor) -> Tensor:
            self.given[rank] = own
            self.barrier.wait()
            both = self.given[0] + self.given[1]
            self.sums += rank == 0
            self.barrier.wait()
            return both

        return summed


@EACH
def test_parts_of_weights_move_as_the_whole_ones_do(make: Make) -> None:
    matrix, bias = weights_of()[1:3]
    halves = [nn.Parameter(part.clone()) for part in matrix.detach().split([4, 2], 1)]
    biases = [nn.Parameter(bias.detach().clone()) for _ in halves]
    together = Together()
    both, parts = make([matrix, bias], lr=0.1), [make(list(own), lr=0.1) for own in zip(halves, biases, strict=True)]
    for rank, optimizer in enumerate(parts):
        optimizer.set_sharded([halves[rank]], together.total(rank))
    with ThreadPoolExecutor(2) as threads:
        for step in range(1, 5):
            grads = give([matrix, bias], step)
            halves[0].grad, halves[1].grad = grads[0].split([4, 2], 1)
            for other in biases:
                other.grad = grads[1].clone()
            both.step()
            list(threads.map(lambda optimizer: optimizer.step(), parts))
    torch.testing.assert_close(torch.cat([half.detach() for half in halves], 1), matrix.detach(), rtol=1e-6, atol=1e-7)
    assert all(torch.equal(other, bias) for other in biases)
    assert together.sums == 4
    check_optimizer(both, {"weight": WeightSlice(dim=1, sizes=(4, 2))})


@EACH
def test_a_network_learns_and_goes_on_from_a_checkpoint(make: Make, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 8)).astype(np.float32)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).astype(np.int64)
    batch = (torch.from_numpy(inputs), torch.from_numpy(labels))

    def trainer() -> Trainer:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))
        nothing = ArraySet(inputs=inputs, targets=labels)
        recipe = Recipe(
            data=lambda: Data(train=nothing, validation=nothing),
            loss=CrossEntropy(),
            optimizer=lambda weights: LARS(weights, lr=0.2, trust=0.1) if make is LARS else LAMB(weights, lr=0.05),
            schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
            batch_size=64,
            steps=120,
        )
        return Trainer(net, recipe, 120, inputs=inputs)

    one = trainer()
    first = one.step(batch, 0).item()
    for step in range(1, 119):
        one.step(batch, step)
    with Saver(tmp_path, one.world) as saver:
        save_checkpoint(saver, one, History(step=119))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    other = trainer()
    restore_checkpoint(checkpoint, other)
    ends = [together.step(batch, 119).item() for together in (one, other)]
    assert ends[0] == ends[1]
    assert ends[0] < 0.4 * first
    assert all(torch.equal(*pair) for pair in zip(one.module.parameters(), other.module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (LARS, {"lr": -1.0}, r"LARS has lr -1.0; it must be 0 or more"),
        (LARS, {"lr": 1.0, "momentum": 1.0}, r"LARS has momentum 1.0; it must be from 0 to below 1"),
        (LARS, {"lr": 1.0, "trust": float("nan")}, r"LARS has trust nan"),
        (LAMB, {"lr": 1.0, "weight_decay": -0.1}, r"LAMB has weight_decay -0.1"),
        (LAMB, {"lr": 1.0, "betas": (0.9, 1.0)}, r"LAMB has betas \(0.9, 1.0\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Make, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        make(weights_of(), **settings)
