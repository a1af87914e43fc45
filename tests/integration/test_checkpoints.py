"""Checkpoints of several processes: read by any number of them, killed while they are written, a disk that is full."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.train.checkpoint.format import newest_checkpoint, read_checkpoint
from penstock.train.checkpoint.lazy_tensors import read_tensors
from penstock.train.checkpoint.saver import Saver
from penstock.train.parallel.world import World

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def run(how: str, folder: Path) -> str:
    command = [sys.executable, "-m", "tests.support.checkpoints", how, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def state_of(folder: Path) -> object:
    found = newest_checkpoint(folder)
    assert found is not None
    return _plain(read_tensors(found.state))


def _plain(value: object) -> object:
    """With tensors as what can be compared bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(value.contiguous().flatten().view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def test_what_four_wrote_one_two_and_four_restore_bit_for_bit(tmp_path: Path) -> None:
    run("sizes", tmp_path)
    place = tmp_path / "first" / "step-00000003"
    names = [f"{group}-{rank:05d}.safetensors" for group in ("best", "state") for rank in range(4)]
    assert sorted(file.name for file in place.iterdir()) == [*names, "state.json"]
    # About as much to each, and nothing twice.
    sizes = [(place / f"state-{rank:05d}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.2 * min(sizes)
    stored = read_checkpoint(place).state["model"]
    kept = {name: (tensor.dim, tensor.sizes) for name, tensor in stored.items() if len(tensor.files) == 4}
    assert kept["0.weight"] == (0, (5, 5, 4, 4))
    assert kept["5.weight"] == (1, (6, 6, 6, 6))
    assert set(kept) == {"0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "7.weight", "7.bias"}
    expected = state_of(tmp_path / "first")
    for size in (1, 2, 4):
        assert state_of(tmp_path / f"by-{size}") == expected


def test_killed_while_some_have_written_the_one_before_is_there(tmp_path: Path) -> None:
    run("killed", tmp_path)
    folder = tmp_path / "run"
    left = [place.name for place in folder.iterdir() if place.name.startswith(".step-00000002-")]
    assert len(left) == 1
    found = newest_checkpoint(folder)
    assert found is not None
    assert found.step == 1
    assert read_tensors(found.state["model"]).keys() == found.state["model"].keys()
    Saver(folder, World())
    assert [place.name for place in folder.iterdir()] == ["step-00000001"]


def test_killed_at_any_moment_of_writing_a_checkpoint_is_left(tmp_path: Path) -> None:
    assert int(run("each", tmp_path)) > 20


@pytest.mark.thorough
def test_a_disk_that_is_full_for_one_ends_all_with_the_sentence(tmp_path: Path) -> None:
    run("full", tmp_path)
    said = {(tmp_path / f"said-{rank}").read_text() for rank in range(4)}
    assert said == {
        "a checkpoint cannot be written: No space left on device (state-00002.safetensors). Make room or repair the "
        "folder, and resume: the run goes on from its newest checkpoint, or begins anew without one."
    }
    found = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.step == 4
