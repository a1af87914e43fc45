"""Checkpoints: what is written, who writes what, what is read back, and what is said of damage."""

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.acceptance.train import checkpoint_stall
from penstock.core.errors import BenchError, TrainError
from penstock.train.checkpoint import format as checkpoint_module
from penstock.train.checkpoint import saver as saver_module
from penstock.train.checkpoint.format import (
    file_of,
    manifest_of,
    mark_written,
    newest_checkpoint,
    parameter_hash,
    publish,
    read_checkpoint,
    write_blocks,
)
from penstock.train.checkpoint.lazy_tensors import StoredTensor, read_tensors
from penstock.train.checkpoint.saver import Saver
from penstock.train.checkpoint.snapshot import HostCopy, SlicedTensor, split, writers_of
from penstock.train.parallel.tensor_parallel import WeightSlice
from penstock.train.parallel.world import World

STATE: dict[str, Any] = {
    "model": {"layer.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3), "none": torch.zeros(0, 2)},
    "optimizer": {
        "state": {0: {"momentum_buffer": torch.ones(2, dtype=torch.bfloat16)}, 7: {"step": 3}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "fused": None, "nesterov": True}],
    },
    "schedule": None,
}
CPU = torch.device("cpu")


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    with Saver(folder, World()) as saver:
        saver.save(step, state, {})
    return folder / f"step-{step:08d}"


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def test_tensors_numbers_and_their_keys_come_back_as_they_were(tmp_path: Path) -> None:
    place = save(tmp_path, 12, STATE)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 12
    assert same(read_tensors(found.state), STATE)
    assert names(place) == ["state-00000.safetensors", "state.json"]
    assert len(load_file(place / "state-00000.safetensors")) == 4


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_a_copy_is_a_safetensors_file_whatever_the_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"odd": torch.randn(3, 5).to(dtype), "turned": torch.randn(4, 3).to(dtype).t(), "one": torch.ones(())}
    copy = HostCopy(CPU)
    copy.take({"longer": torch.zeros(100)})
    copy.take(tensors)
    for tensor in tensors.values():
        # The steps go on.
        tensor.copy_(torch.zeros_like(tensor))
    write_blocks(tmp_path / "x.safetensors", copy.blocks(), copy.size)
    torch.manual_seed(0)
    again = {"odd": torch.randn(3, 5).to(dtype), "turned": torch.randn(4, 3).to(dtype).t(), "one": torch.ones(())}
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == again.keys()
    for name, tensor in again.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("how", ["past the system's copy", "refused at once", "refused when it writes", "in parts"])
def test_a_file_is_what_was_copied_however_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tensor = torch.arange(10_001, dtype=torch.int32)
    copy = HostCopy(CPU)
    copy.take({"x": tensor})
    set_flags, write, asked = fcntl.fcntl, os.write, [0]

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, flags)

    def refuse_blocks(descriptor: int, data: memoryview) -> int:
        asked[0] += 1
        if asked[0] == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    if how == "refused at once":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    elif how == "refused when it writes":
        monkeypatch.setattr(os, "write", refuse_blocks)
        # Where the file system of this test has no such way, there is nothing to go back to.
        monkeypatch.setattr(checkpoint_module, "_direct", lambda descriptor, on: True)
    elif how == "in parts":
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4096]))
    said = write_blocks(tmp_path / "x.safetensors", copy.blocks(), copy.size)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert said == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


def written_by(folder: Path, size: int, states: list[dict[str, Any]], missing: tuple[int, ...] = ()) -> Path:
    """A checkpoint of several processes, one after the other and the first one last."""
    beside, place = folder / ".step-00000003-5eed", folder / "step-00000003"
    beside.mkdir(parents=True)
    for rank in reversed(range(size)):
        parts: dict[str, SlicedTensor] = {}
        values = split(states[rank], "", parts)
        mine = {path: parts[path].own for path, ranks in writers_of(parts, size).items() if rank in ranks}
        copy = HostCopy(CPU)
        copy.take(mine)
        written = {file_of("state", rank): write_blocks(beside / file_of("state", rank), copy.blocks(), copy.size)}
        if rank not in missing:
            mark_written(beside, rank, written)
        if rank == 0:
            given_up = threading.Event()
            if missing:
                given_up.set()
            manifest = manifest_of(3, values, {"state": parts}, size)
            assert publish(beside, place, manifest, given_up) is not bool(missing)
    return place


def cut(whole: Mapping[str, Tensor], shards: Mapping[str, WeightSlice], rank: int) -> dict[str, Any]:
    return {
        name: SlicedTensor(own=shards[name].of(tensor, rank), slices=shards[name]) if name in shards else tensor
        for name, tensor in whole.items()
    }


def whole_tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {"rows": (7, 3), "columns": (4, 6), "few": (2, 3), "plain": (5,), "big": (40, 40), "scalar": ()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


SHARDS = {
    "rows": WeightSlice(dim=0, sizes=(2, 2, 2, 1)),
    "columns": WeightSlice(dim=1, sizes=(2, 2, 1, 1)),
    # Fewer rows than processes.
    "few": WeightSlice(dim=0, sizes=(1, 1, 0, 0)),
}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_what_four_processes_wrote_any_number_reads_however_it_is_cut(tmp_path: Path, count: int) -> None:
    whole = whole_tensors()
    place = written_by(tmp_path, 4, [cut(whole, SHARDS, rank) for rank in range(4)])
    assert names(place) == [*(f"state-{rank:05d}.safetensors" for rank in range(4)), "state.json"]
    state = read_checkpoint(place).state
    assert same(read_tensors(state), whole)
    for name, tensor in whole.items():
        for dim, length in enumerate(tensor.shape):
            sizes = [len(part) for part in torch.arange(length).tensor_split(count)]
            parts = [state[name].part(dim, sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]
            assert all(torch.equal(one, other) for one, other in zip(parts, tensor.split(sizes, dim), strict=True))
    for dim, first, size in ((0, 6, 2), (2, 0, 1)):
        with pytest.raises(TrainError, match=r"does not fit the network: /rows has the shape \[7, 3\]"):
            state["rows"].part(dim, first, size)


def test_what_all_have_alike_is_dealt_out_by_bytes() -> None:
    alike = {f"/{index}": SlicedTensor(own=torch.zeros(size)) for index, size in enumerate((9, 7, 6, 5, 4, 3, 2))}
    uneven = {"/cut": SlicedTensor(own=torch.zeros(12), slices=WeightSlice(dim=0, sizes=(12, 0, 0)))}
    kept = writers_of(alike | uneven, 3)
    assert kept["/cut"] == (0, 1, 2)
    loads = [12, 0, 0]
    for path, part in alike.items():
        (rank,) = kept[path]
        loads[rank] += part.own.numel()
    assert max(loads) - min(loads) <= 2
    assert writers_of(alike, 1) == dict.fromkeys(alike, (0,))


def test_a_part_that_does_not_come_keeps_a_checkpoint_from_its_name(tmp_path: Path) -> None:
    whole = whole_tensors()
    save(tmp_path, 2, {"x": 1})
    written_by(tmp_path, 4, [cut(whole, SHARDS, rank) for rank in range(4)], missing=(2,))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2
    Saver(tmp_path, World())
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("name", ["state-00002.safetensors", "state.json"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [("flip", "altered"), ("cut", "(altered|has [0-9]+ bytes of)"), ("remove", "(missing|No such file)")],
)
def test_a_damaged_checkpoint_is_refused_with_the_way_out(tmp_path: Path, name: str, damage: str, said: str) -> None:
    place = written_by(tmp_path, 4, [cut(whole_tensors(), SHARDS, rank) for rank in range(4)])
    file = place / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        # A digit of a number: what is left is JSON.
        at = data.index(b'"step": 3') + 8 if name == "state.json" else len(data) - 1
        data[at] ^= 0x01
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    with pytest.raises(TrainError, match=rf"{name}.*{said}.*; remove .*step-00000003 to go on from the one before"):
        read_checkpoint(place)


@pytest.mark.parametrize("name", ["state-00000.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_newest_checkpoint_is_stepped_over_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    save(tmp_path, 1, STATE)
    place = save(tmp_path, 2, STATE)
    data = (place / name).read_bytes()
    (place / name).unlink()
    if damage == "truncated":
        (place / name).write_bytes(data[:-7])
    elif damage == "altered":
        (place / name).write_bytes(data.replace(b'"step": 2', b'"step": 3')[:-1] + b" ")
    for set_aside in (False, True):
        caplog.clear()
        found = newest_checkpoint(tmp_path, set_aside=set_aside)
        assert found is not None
        assert found.step == 1
        assert same(read_tensors(found.state), STATE)
        assert f"the checkpoint {place} is not as it was written: {name} " in caplog.text
        assert "the run goes on from the one before, of step 1" in caplog.text
        assert place.exists() is not set_aside
    assert names(tmp_path) == [".damaged-step-00000002", "step-00000001"]
    caplog.clear()
    # Two whole ones are kept again, and the next damaged one replaces the last.
    save(tmp_path, 2, STATE)
    assert newest_checkpoint(tmp_path).step == 2  # pyright: ignore[reportOptionalMemberAccess]
    assert not caplog.text
    (place / name).unlink()
    newest_checkpoint(tmp_path, set_aside=True)
    assert names(tmp_path) == [".damaged-step-00000002", "step-00000001"]


def test_where_all_checkpoints_are_damaged_the_run_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step, STATE) / "state.json").unlink()
    with pytest.raises(TrainError, match=r"step-00000002 .*state.json is missing, and there is no whole one before it"):
        newest_checkpoint(tmp_path, set_aside=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_one_that_cannot_be_read_now_is_not_stepped_over(tmp_path: Path) -> None:
    save(tmp_path, 1, STATE)
    values = save(tmp_path, 2, STATE) / "state.json"
    values.unlink()
    values.mkdir()
    with pytest.raises(TrainError, match=r"state.json cannot be read \(Is a directory\); repair the folder"):
        newest_checkpoint(tmp_path, set_aside=True)


def test_one_of_another_format_is_named(tmp_path: Path) -> None:
    place = tmp_path / "step-00000007"
    place.mkdir()
    (place / "state.json").write_text('{"step": 7, "state": null, "sha256": "", "seal": ""}')
    with pytest.raises(TrainError, match="is of format 1, and this version of Penstock reads 2"):
        newest_checkpoint(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007-4711").mkdir()
    save(tmp_path, 9, STATE)
    assert names(tmp_path) == ["step-00000009"]


def test_the_newest_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    with Saver(tmp_path, World()) as saver:
        for step in (5, 10, 15, 100_000_000):
            saver.save(step, {"x": step}, {})
    (tmp_path / "step-00000015 (copy)").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"x": 100_000_000}
    assert names(tmp_path) == ["step-00000015", "step-00000015 (copy)", "step-100000000"]


def test_one_that_was_only_begun_is_never_seen(tmp_path: Path) -> None:
    save(tmp_path, 1, {"x": 1})
    begun = tmp_path / ".step-00000002-99"
    begun.mkdir()
    (begun / "state.json").write_text("{}")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_cannot_be_kept_without_pickle_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="/optimizer/hook holds a function"):
        save(tmp_path, 1, {"optimizer": {"hook": lambda: None}})
    with pytest.raises(TrainError, match=r"/x is a tensor of torch.complex128, which a checkpoint cannot keep"):
        save(tmp_path, 1, {"x": torch.zeros(2, dtype=torch.complex128)})


def test_the_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, begun = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> dict[str, Any]:
        begun.set()
        assert may_write.wait(60)
        return write_blocks(*arguments)

    monkeypatch.setattr(saver_module, "write_blocks", slow)
    weight = torch.ones(3)
    with Saver(tmp_path, World()) as saver:
        saver.save(1, {"weight": weight}, {})
        assert begun.wait(60)
        weight += 1
        assert saver.is_busy
        assert newest_checkpoint(tmp_path) is None
        threading.Timer(0.05, may_write.set).start()
        saver.save(2, {"weight": weight}, {})
        # The one before is there, for this one has waited for it.
        assert (tmp_path / "step-00000001").exists()
        weight += 1
    one, two = (read_checkpoint(tmp_path / f"step-0000000{step}").state["weight"] for step in (1, 2))
    assert (one.whole().tolist(), two.whole().tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("links", [True, False])
def test_what_has_not_changed_is_linked_and_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    best = {"weights": {"w": torch.ones(3)}}
    with Saver(tmp_path, World()) as saver:
        for step, version in ((1, 7), (2, 7), (3, 7), (4, 8)):
            saver.save(step, {"model": torch.full((2,), float(step)), "best": best}, {"best": version})
            saver.wait()
            if step == 3:
                best["weights"]["w"] += 1
                files = [tmp_path / f"step-0000000{kept}" / "best-00000.safetensors" for kept in (2, 3)]
                assert files[0].samefile(files[1]) is links
    for step, value in ((3, 1.0), (4, 2.0)):
        state = read_tensors(read_checkpoint(tmp_path / f"step-0000000{step}").state)
        assert same(
            state, {"model": torch.full((2,), float(step)), "best": {"weights": {"w": torch.full((3,), value)}}}
        )


def test_an_error_of_the_background_is_said_and_the_one_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device", "state-00000.safetensors")

    saver = Saver(tmp_path / "run", World())
    saver.save(1, STATE, {})
    saver.wait()
    saver.check()
    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "write_blocks", full)
        saver.save(2, STATE, {})
        with pytest.raises(
            TrainError, match=r"No space left on device \(state-00000.safetensors\). Make room or repair"
        ):
            saver.wait()
    assert saver.has_failed
    with pytest.raises(TrainError, match="a checkpoint cannot be written"):
        saver.check()
    assert [name for name in names(tmp_path / "run") if not name.startswith(".")] == ["step-00000001"]


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "run", World())
    (tmp_path / "run").rmdir()
    saver.save(1, STATE, {})
    with pytest.raises(TrainError, match="No such file or directory"):
        saver.wait()


def test_an_error_of_the_steps_leaves_a_checkpoint_the_time_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(*arguments: Any) -> dict[str, Any]:
        assert may_write.wait(60)
        return write_blocks(*arguments)

    monkeypatch.setattr(saver_module, "write_blocks", slow)

    def fail() -> None:
        with Saver(tmp_path, World()) as saver:
            saver.save(1, STATE, {})
            threading.Timer(0.05, may_write.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == ["step-00000001"]


def test_a_tensor_that_is_read_does_not_hold_the_file(tmp_path: Path) -> None:
    place = save(tmp_path, 1, STATE)
    stored = read_checkpoint(place).state["model"]["layer.weight"]
    assert isinstance(stored, StoredTensor)
    assert stored.shape == (2, 3)
    first = stored.whole()
    first.zero_()
    assert torch.equal(stored.whole(), STATE["model"]["layer.weight"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of what a checkpoint costs, in a second and of whatever a busy machine gives."""
    for name, value in {
        "REPEAT": 2,
        "PART_S": 0.02,
        "WARM_STEPS": 1,
        "FEATURES": 8,
        "WIDTH": 16,
        "CLASSES": 16,
    }.items():
        monkeypatch.setattr(checkpoint_stall, name, value)
    monkeypatch.setattr(checkpoint_stall, "SPREAD", 1e9)


def test_what_a_checkpoint_costs_is_measured_and_what_was_written_is_compared(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(checkpoint_stall.lost_fractions()) == 2
    take = HostCopy.take

    def wrong(self: HostCopy, tensors: Mapping[str, Tensor]) -> None:
        take(self, {name: tensor + 1 for name, tensor in tensors.items()})

    monkeypatch.setattr(HostCopy, "take", wrong)
    with pytest.raises(BenchError, match="other weights than at the time of its request"):
        checkpoint_stall.lost_fractions()


def test_steps_that_take_now_so_and_now_so_long_give_no_figure(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_stall, "SPREAD", -1.0)
    with pytest.raises(BenchError, match="use an idle machine"):
        checkpoint_stall.lost_fractions()


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
