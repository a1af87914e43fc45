"""The running mean of weights and of batch norms' statistics: begun anew or warmed up, and carried by checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.nn.normalisation import SequenceBatchNorm
from penstock.train.checkpoint.format import Checkpoint, newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.batch_norm import synchronize
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, EMASettings, Recipe
from penstock.train.step.ema import EMA
from penstock.train.trainer import Trainer

DECAY = 0.75
INPUTS = np.random.default_rng(0).normal(2.0, size=(8, 6)).astype(np.float32)
BATCH = (torch.from_numpy(INPUTS), torch.arange(8) % 3)


def trainer(**changes: Any) -> Trainer:
    torch.manual_seed(0)
    nothing = ArraySet(inputs=INPUTS, targets=INPUTS)
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=nn.functional.cross_entropy,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        batch_size=8,
        steps=20,
        ema=EMASettings(decay=DECAY),
    )
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    return Trainer(net, replace(recipe, **changes), 20, inputs=INPUTS)


def state(of: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.module.state_dict().items()}


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_mean_is_of_weights_and_statistics_and_what_is_evaluated(warm_up: bool) -> None:
    one = trainer(ema=EMASettings(decay=DECAY, warm_up=warm_up))
    mean = {name: tensor.double() for name, tensor in state(one).items()}
    for step in range(20):
        one.step(BATCH, step)
        kept = min(DECAY, (1 + step) / (10 + step)) if warm_up else DECAY
        for name, own in state(one).items():
            mean[name] = kept * mean[name] + (1 - kept) * own
    last = state(one)
    with one.ema_weights():
        averaged = state(one)
        for name in ("0.weight", "0.running_mean", "0.running_var", "1.weight", "1.bias"):
            torch.testing.assert_close(averaged[name].double(), mean[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(averaged[name], last[name])
        # A count is not averaged.
        assert averaged["0.num_batches_tracked"] == 20
    assert all(torch.equal(last[name], tensor) for name, tensor in state(one).items())


def test_a_warm_mean_ends_at_the_decay() -> None:
    net = nn.Linear(1, 1, bias=False)
    average = EMA(net, 0.5, warm_up=True)
    kept: list[float] = []
    for _ in range(12):
        with torch.no_grad():
            average.mean["weight"].fill_(1.0)
            net.weight.zero_()
        average.update()
        kept.append(average.mean["weight"].item())
    assert kept == pytest.approx([min(0.5, (1 + step) / (10 + step)) for step in range(12)])


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_run_goes_on_with_its_mean(tmp_path: Path, warm_up: bool) -> None:
    one = trainer(ema=EMASettings(decay=DECAY, warm_up=warm_up))
    for step in range(3):
        one.step(BATCH, step)
    with Saver(tmp_path, one.world) as saver:
        save_checkpoint(saver, one, History(step=3))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    other = trainer(ema=EMASettings(decay=DECAY, warm_up=warm_up))
    restore_checkpoint(checkpoint, other)
    for together in (one, other):
        together.step(BATCH, 3)
    with one.ema_weights(), other.ema_weights():
        for name, tensor in state(one).items():
            assert torch.equal(state(other)[name], tensor)


def test_the_mean_of_other_tensors_is_refused() -> None:
    one = trainer()
    history: dict[str, Any] = {
        "model": one.full_state(),
        "optimizer": one.optimizer.state_dict(),
        "ema": {"1.weight": torch.zeros(3, 6)},
    }
    with pytest.raises(TrainError, match=r"EMA and this network's differ in '0\.bias'"):
        restore_checkpoint(Checkpoint(step=0, state={**history, "best": {}}), one)


def test_the_statistics_of_every_kind_of_batch_norm_are_averaged_and_constants_are_not() -> None:
    net = nn.Sequential(nn.BatchNorm2d(2), SequenceBatchNorm(3), nn.BatchNorm1d(2, track_running_stats=False))
    group: Any = object()
    pictures = nn.Sequential(nn.BatchNorm2d(2))
    synchronize(pictures, World(0, 2, group=group), (4, 4))
    net.append(pictures)
    net.register_buffer("table", torch.zeros(2))
    found = set(EMA(net, 0.9).mean) - {name for name, _ in net.named_parameters()}
    statistics = [("0", "running_mean", "running_var"), ("1", "mean_D", "variance_D")]
    statistics.append(("3.0", "running_mean", "running_var"))
    assert found == {f"{layer}.{own}" for layer, *both in statistics for own in both}


def test_a_decay_that_keeps_all_is_refused() -> None:
    with pytest.raises(TrainError, match=r"ema\.decay 1\.0; it must be from 0 to below 1"):
        EMASettings(decay=1.0)
