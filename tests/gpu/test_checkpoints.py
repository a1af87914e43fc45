"""Checkpoints of a GPU's state: what was there when it was asked for, whatever the steps overwrite meanwhile."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.train.checkpoint.format import newest_checkpoint, read_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.checkpoint.snapshot import HostCopy
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, EMASettings, Recipe
from penstock.train.trainer import Trainer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
NOTHING = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
RECIPE = Recipe(
    data=lambda: Data(train=NOTHING, validation=NOTHING),
    loss=CrossEntropy(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    batch_size=8,
    steps=1,
    ema=EMASettings(decay=0.9),
)


def test_what_is_copied_is_not_what_comes_after(tmp_path: Path) -> None:
    # Large enough that copying takes longer than asking for it and for what overwrites it.
    tensors = {str(index): torch.full((1 << 25,), float(index), device=DEVICE) for index in range(4)}
    turned = torch.arange(12.0, device=DEVICE).reshape(3, 4).t()
    with Saver(tmp_path, World(device=DEVICE)) as saver:
        for step in (1, 2):
            for index, tensor in enumerate(tensors.values()):
                tensor.fill_(10.0 * step + index)
            saver.save(step, {**tensors, "turned": turned, "on the CPU": torch.tensor(step)}, {})
            for tensor in tensors.values():
                tensor.fill_(-1.0)
    for step in (1, 2):
        state = read_checkpoint(tmp_path / f"step-0000000{step}").state
        for index, name in enumerate(tensors):
            assert (state[name].whole() == 10.0 * step + index).all()
        assert torch.equal(state["turned"].whole(), turned.cpu())
        assert state["on the CPU"].whole() == step


def test_the_memory_of_copies_is_page_locked_and_used_again() -> None:
    copy = HostCopy(DEVICE)
    places: list[int] = []
    for value in (1.0, 2.0):
        copy.take({"x": torch.full((1000,), value, device=DEVICE)})
        assert copy._memory.is_pinned()
        places.append(copy._memory.data_ptr())
        assert bytes(copy.blocks()[: copy.size])[-4:] == np.float32(value).tobytes()
    assert places[0] == places[1]


def test_a_captured_step_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))
    batch = inputs.to(DEVICE), labels.to(DEVICE)

    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)),
            RECIPE,
            40,
            World(device=DEVICE),
            inputs=inputs.numpy(),
        )

    one, history = trainer(), History()
    with Saver(tmp_path, one.world) as saver:
        for step in range(20):
            one.step(batch, step)
            history.step += 1
            if history.step in (5, 12):
                save_checkpoint(saver, one, history)
    expected = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 12
    other = trainer()
    restore_checkpoint(checkpoint, other)
    for step in range(12, 20):
        other.step(batch, step)
    for name, tensor in other.module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])
