from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.core.errors import TrainError
from penstock.train.checkpoint import Checkpoint, newest_checkpoint, parameter_hash, read_checkpoint, save_checkpoint

STATE = {
    "model": {"layer.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)},
    "optimizer": {
        "state": {0: {"momentum_buffer": torch.ones(2, dtype=torch.bfloat16)}, 7: {"step": 3}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "fused": None, "nesterov": True}],
    },
    "schedule": None,
}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_tensors_numbers_and_their_keys_come_back_as_they_were(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(step=12, state=STATE))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 12
    assert same(found.state, STATE)
    assert {file.name for file in (tmp_path / "step-00000012").iterdir()} == {"state.safetensors", "state.json"}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007-4711").mkdir()
    save_checkpoint(tmp_path, Checkpoint(step=9, state=STATE))
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000009"]


def test_the_newest_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (5, 10, 15, 100_000_000):
        save_checkpoint(tmp_path, Checkpoint(step=step, state={"x": step}))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-00000015", "step-100000000"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"x": 100_000_000}


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_with_the_way_out(tmp_path: Path, name: str, damage: str) -> None:
    place = save_checkpoint(tmp_path, Checkpoint(step=1, state=STATE))
    file = place / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    with pytest.raises(TrainError, match=r"remove .*step-00000001 to go on from the one before"):
        read_checkpoint(place)


def test_one_that_was_only_begun_is_never_seen(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(step=1, state={"x": 1}))
    begun = tmp_path / ".step-00000002-99"
    begun.mkdir()
    (begun / "state.json").write_text("{}")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_cannot_be_kept_without_pickle_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="/optimizer/hook holds a function"):
        save_checkpoint(tmp_path, Checkpoint(step=1, state={"optimizer": {"hook": lambda: None}}))


def test_the_parameter_hash_knows_every_bit_and_name() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert parameter_hash(one) != parameter_hash(other)
    other.load_state_dict(one.state_dict())
    assert parameter_hash(one) == parameter_hash(other)
    with torch.no_grad():
        other.weight[0, 0] = torch.nextafter(other.weight[0, 0], torch.tensor(9.0))
    assert parameter_hash(one) != parameter_hash(other)
    assert parameter_hash(nn.Sequential(one)) != parameter_hash(one)
