"""Runs at URLs: uploaded in an order that leaves whole checkpoints, and brought to another machine."""

import json
import logging
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import ApplicationError, BundleError, StorageError, TrainError
from penstock.core.storage.remote_folder import RemoteFolder
from penstock.runtime.bundle_writer import Bundle
from penstock.train import run_uploads
from penstock.train.callbacks.callback import Callback, CheckpointWritten, StepTaken, Stop, Validated
from penstock.train.checkpoint.format import checkpoint_places, newest_checkpoint, read_checkpoint, step_folder
from penstock.train.checkpoint.remote_checkpoints import download_checkpoint, upload_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.checkpoint.snapshot import SlicedTensor
from penstock.train.fit import fit
from penstock.train.parallel.world import World
from penstock.train.run_place import OWNER, RunPlace, fetch_records
from penstock.train.run_uploads import RunUploads, upload_rest
from tests.support.processes import eventually
from tests.support.small import examples, network, small, written

URL = "memory://bucket/runs/x"


@pytest.fixture(autouse=True)
def memory() -> Generator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def checkpoint(run: Path, *steps: int) -> None:
    with Saver(run / "checkpoints", World()) as saver:
        for step in steps:
            state = {"model": {"weight": SlicedTensor(own=torch.full((4,), float(step)))}}
            saver.save(step, state, {})


def begun(cache: Path, *steps: int) -> RunPlace:
    """A run that a command on a machine has begun; with checkpoints."""
    place = RunPlace.of(URL, cache)
    place.fetch()
    place.fetch_checkpoint()
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / "run.json").write_text(json.dumps({"state": "running"}))
    (place.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    checkpoint(place.folder, *steps)
    return place


def step_here(place: RunPlace) -> int:
    found = newest_checkpoint(place.folder / "checkpoints")
    return -1 if found is None else found.step


def names() -> list[str]:
    return sorted(RemoteFolder(URL).sizes())


def test_what_a_run_writes_is_at_the_url_and_the_bundle_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    plain = RemoteFolder.upload

    def noted(self: RemoteFolder, file: Path, name: str) -> None:
        order.append(name)
        plain(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", noted)
    place = begun(tmp_path, 10)
    with RunUploads(place) as uploads:
        written(place.folder / "bundle")
        uploads.checkpoint(CheckpointWritten(step=10, folder=place.folder))
        eventually(lambda: len(order) == 4, within_s=10)
        assert order == [
            "metrics.jsonl",
            "run.json",
            "checkpoints/step-00000010/state-00000.safetensors",
            "checkpoints/step-00000010/state.json",
        ]
        (place.folder / "run.json").write_text(json.dumps({"state": "finished"}))
    assert order[4:] == [
        "bundle/golden.safetensors",
        "bundle/weights.safetensors",
        "bundle/manifest.json",
        "run.json",
    ]
    assert names() == sorted({*order, OWNER})
    assert not (place.folder / ".uploading").exists()


def test_another_machine_goes_on_where_the_first_one_was(tmp_path: Path) -> None:
    with RunUploads(begun(tmp_path / "a", 10, 20)):
        pass
    other = begun(tmp_path / "b")
    assert step_here(other) == 20
    with RunUploads(other):
        checkpoint(other.folder, 30, 40)
    assert {name.split("/")[1] for name in names() if "checkpoints" in name} == {"step-00000020", "step-00000040"}
    # The first machine has an old copy now.
    first = begun(tmp_path / "a")
    assert step_here(first) == 40
    assert [int(place.name[5:]) for place in checkpoint_places(first.folder / "checkpoints")] == [40]


def test_a_copy_that_is_ahead_of_the_url_is_kept(tmp_path: Path) -> None:
    place = begun(tmp_path, 10)
    with RunUploads(place):
        pass
    checkpoint(place.folder, 20)
    assert step_here(begun(tmp_path)) == 20


def test_a_run_that_was_removed_at_the_url_begins_anew(tmp_path: Path, memory: Any) -> None:
    with RunUploads(begun(tmp_path, 10)):
        pass
    memory.store.clear()
    place = RunPlace.of(URL, tmp_path)
    place.fetch()
    assert not (place.folder / "run.json").exists()
    assert step_here(place) == -1


def test_another_run_at_the_same_url_replaces_the_copy(tmp_path: Path, memory: Any) -> None:
    with RunUploads(begun(tmp_path / "a", 30)):
        pass
    memory.store.clear()
    with RunUploads(begun(tmp_path / "b", 10)):
        pass
    assert step_here(begun(tmp_path / "a")) == 10


def test_a_checkpoint_without_its_last_file_is_none_and_goes(tmp_path: Path) -> None:
    place = begun(tmp_path / "a", 10)
    with RunUploads(place):
        pass
    remote = RemoteFolder(URL)
    remote.write("checkpoints/step-00000020/state-00000.safetensors", b"half")
    other = begun(tmp_path / "b", 30)
    assert [int(each.name[5:]) for each in checkpoint_places(other.folder / "checkpoints")] == [10, 30]
    with RunUploads(other):
        pass
    assert not [name for name in names() if "step-00000020" in name]


def test_a_damaged_checkpoint_is_refused_with_its_url(tmp_path: Path) -> None:
    with RunUploads(begun(tmp_path / "a", 10)):
        pass
    RemoteFolder(URL).write("checkpoints/step-00000010/state-00000.safetensors", b"x")
    with pytest.raises(TrainError, match=f"has 1 bytes of .*; remove {URL}/checkpoints/step-00000010 to go on"):
        begun(tmp_path / "b")


def test_a_step_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with RunUploads(begun(tmp_path / "a", 10)):
        pass
    with pytest.raises(TrainError, match=f"^{URL} has no checkpoint of step 15; its checkpoints: 10.$"):
        RunPlace.of(URL, tmp_path / "b").fetch_checkpoint(15)


class Vanished:
    """Lets a bucket vanish."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_gone = False
        for name in ("upload", "write", "read", "sizes"):
            monkeypatch.setattr(RemoteFolder, name, self._failing(getattr(RemoteFolder, name)))

    def _failing(self, plain: Any) -> Any:
        def call(remote: RemoteFolder, *arguments: Any) -> Any:
            if self.is_gone:
                raise StorageError(f"{remote} cannot be read (it vanished); check the address and the network.")
            return plain(remote, *arguments)

        return call


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Vanished:
    monkeypatch.setattr(run_uploads, "FIRST_WAIT_S", 0.05)
    return Vanished(monkeypatch)


def test_a_bucket_that_vanishes_is_said_once_and_tried_again(
    tmp_path: Path, bucket: Vanished, caplog: pytest.LogCaptureFixture
) -> None:
    place = begun(tmp_path, 10)
    with caplog.at_level(logging.WARNING), RunUploads(place) as uploads:
        bucket.is_gone = True
        for step in (10, 20, 30):
            uploads.checkpoint(CheckpointWritten(step=step, folder=place.folder))
        eventually(lambda: bool(caplog.messages), within_s=10)
        bucket.is_gone = False
        eventually(lambda: len(caplog.messages) == 2, within_s=10)
    first, second = caplog.messages
    assert first.endswith(f"The training goes on, with its checkpoints in {place.folder}.")
    assert second == f"{URL} can be written again."
    assert "run.json" in names()


def test_checkpoints_without_a_run_are_not_gone_on_with(tmp_path: Path) -> None:
    with RunUploads(begun(tmp_path / "a", 10)):
        pass
    RemoteFolder(URL).delete("run.json")
    place = RunPlace.of(URL, tmp_path / "b")
    place.fetch()
    place.fetch_checkpoint()
    assert step_here(place) == -1


def test_what_is_not_uploaded_is_named_at_the_end_and_uploaded_by_the_next_command(
    tmp_path: Path, bucket: Vanished
) -> None:
    place = begun(tmp_path, 10)
    with pytest.raises(TrainError) as refused, RunUploads(place, final_s=0.1) as uploads:  # noqa: PT012
        bucket.is_gone = True
        written(place.folder / "bundle")
        uploads.validation(Validated(step=10, figures={}, is_best=True))
    assert str(refused.value) == (
        f"the training is finished, and the checkpoint of step 10, the bundle, metrics.jsonl, run.json is not uploaded "
        f"to {URL}, but kept in {place.folder}: {URL} cannot be read (it vanished); check the address and the network. "
        f"Then give the same command again, which uploads it."
    )
    bucket.is_gone = False
    upload_rest(place)
    assert {"bundle/manifest.json", "run.json", "checkpoints/step-00000010/state.json"} <= {*names()}


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_upload(
    tmp_path: Path, bucket: Vanished, caplog: pytest.LogCaptureFixture
) -> None:
    place = begun(tmp_path, 10)
    with pytest.raises(ZeroDivisionError), RunUploads(place, final_s=0.1):  # noqa: PT012
        bucket.is_gone = True
        raise ZeroDivisionError
    assert "is not uploaded" in caplog.messages[-1]


def test_a_bucket_that_is_not_writable_is_refused_at_the_start(tmp_path: Path, bucket: Vanished) -> None:
    place = begun(tmp_path)
    bucket.is_gone = True
    with pytest.raises(StorageError, match="it vanished"):
        RunUploads(place)


def test_a_command_that_is_taken_over_ends_and_writes_nothing_more(tmp_path: Path) -> None:
    place, before = begun(tmp_path / "a", 10), list[str]()
    with pytest.raises(TrainError, match="another command has taken over"), RunUploads(place) as first:  # noqa: PT012
        with RunUploads(begun(tmp_path / "b", 20)):
            pass
        before += names()
        checkpoint(place.folder, 30)

        def refused() -> bool:
            try:
                first.checkpoint(CheckpointWritten(step=30, folder=place.folder))
            except TrainError:
                return True
            return False

        eventually(refused, within_s=10)
        first.validation(Validated(step=30, figures={}, is_best=True))
    assert names() == before


def test_a_bucket_that_was_emptied_gets_everything_again(tmp_path: Path, memory: Any) -> None:
    place = begun(tmp_path, 10)
    with RunUploads(place) as uploads:
        uploads.checkpoint(CheckpointWritten(step=10, folder=place.folder))
        eventually(lambda: "run.json" in names(), within_s=10)
        memory.store.clear()
    assert {"run.json", "metrics.jsonl", OWNER, "checkpoints/step-00000010/state.json"} <= {*names()}


def test_a_checkpoint_that_is_replaced_while_it_is_uploaded_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = begun(tmp_path, 10)
    plain = RemoteFolder.upload

    def slow(self: RemoteFolder, file: Path, name: str) -> None:
        if "step-00000010" in name and step_folder(place.folder / "checkpoints", 10).exists():
            checkpoint(place.folder, 20, 30)
            assert not step_folder(place.folder / "checkpoints", 10).exists()
        plain(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", slow)
    with RunUploads(place) as uploads:
        uploads.checkpoint(CheckpointWritten(step=10, folder=place.folder))
        eventually(lambda: "checkpoints/step-00000010/state.json" in names(), within_s=10)
        other = RunPlace.of(URL, tmp_path / "b")
        other.fetch_checkpoint()
        assert step_here(other) == 10


def test_a_file_that_is_in_the_checkpoint_before_is_copied_at_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    sent: list[str] = []
    plain = RemoteFolder.upload

    def noted(self: RemoteFolder, file: Path, name: str) -> None:
        sent.append(name)
        plain(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", noted)
    for url in (URL, f"file://{tmp_path}/bucket/x"):
        sent.clear()
        remote, contents = RemoteFolder(url), dict[str, str]()
        run = tmp_path / url.partition(":")[0]
        for step, best in ((10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)):
            with Saver(run / "checkpoints", World()) as saver:
                state = {
                    "model": {"weight": SlicedTensor(own=torch.full((4,), float(step)))},
                    "best": {"weight": SlicedTensor(own=torch.full((4,), best))},
                }
                saver.save(step, state, {"best": int(best)})
            assert upload_checkpoint(remote, step, run, 2, contents)
        best_files = [name for name in sent if "/best-" in name]
        assert best_files == [f"checkpoints/step-000000{step}/best-00000.safetensors" for step in (10, 30)]
        # The checkpoints are whole, also those whose file was copied from one that is gone.
        for step in (30, 40):
            other = download_checkpoint(remote, step, tmp_path / f"other-{remote.scheme}")
            read_checkpoint(other)
        # An older link is not changed by a later file of the same name.
        if remote.scheme == "file":
            (tmp_path / "short").write_bytes(b"short")
            remote.upload(tmp_path / "short", best_files[0].replace("10", "40"))
            read_checkpoint(download_checkpoint(remote, 30, tmp_path / "again"))


def test_fit_at_a_url_goes_on_on_another_machine(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = X @ np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)

    class StopAfter(Callback):
        def __init__(self, step: int) -> None:
            self.at = step

        def step(self, event: StepTaken) -> Stop | None:
            return Stop(reason="as told") if event.step == self.at else None

    def trained(cache: str, out: object = URL, **given: Any) -> Any:
        network = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(network.weight)
        torch.nn.init.zeros_(network.bias)
        where: Any = {"out": out, "cache": tmp_path / cache} if out else {}
        return fit(network, (X, y), validation=(X, y), epochs=4, batch_size=16, quiet=True, **where, **given)

    whole = trained("none", out=None)
    trained("one", callbacks=[StopAfter(8)])
    assert {"run.json", OWNER, "metrics.jsonl"} <= {*names()}
    assert any(name.startswith("checkpoints/step-00000008/") for name in names())
    fitted = trained("two")
    assert fitted.parameter_hash == whole.parameter_hash
    assert json.loads(RemoteFolder(URL).read("run.json") or b"")["state"] == "finished"
    # A finished training is not trained again.
    assert trained("three").parameter_hash == whole.parameter_hash


def test_a_new_run_beside_one(tmp_path: Path) -> None:
    for _ in range(2):
        place = RunPlace.of(URL, tmp_path)
        if RemoteFolder(URL).read("run.json"):
            place = place.beside(tmp_path)
        place.folder.mkdir(parents=True)
        (place.folder / "run.json").write_text("{}")
        with RunUploads(place):
            pass
    assert str(RunPlace.of(URL, tmp_path).beside(tmp_path)) == f"{URL}-3"


def test_records_of_all_runs_below_a_url(tmp_path: Path) -> None:
    with RunUploads(begun(tmp_path / "a", 10)):
        pass
    fetch_records(RemoteFolder("memory://bucket"), tmp_path / "copies")
    files = [str(file.relative_to(tmp_path / "copies")) for file in (tmp_path / "copies").rglob("*") if file.is_file()]
    assert sorted(files) == ["runs/x/metrics.jsonl", "runs/x/run.json"]
    with pytest.raises(TrainError, match="there is no run in memory://none"):
        fetch_records(RemoteFolder("memory://none"), tmp_path / "none")


def test_places_that_cannot_be_are_sentences(tmp_path: Path) -> None:
    assert str(RunPlace.of(tmp_path / "x", tmp_path)) == str(tmp_path / "x")
    with pytest.raises(StorageError, match=r"^hf://user/name is a repository.* 'penstock push RUN/bundle hf://"):
        RunPlace.of("hf://user/name", tmp_path)
    with pytest.raises(BundleError, match=r"^s3://b/x is a URL; write to a folder"):
        Bundle.write(small(), network(), examples(), to="s3://b/x")


def test_names_that_lead_out_of_a_run_are_not_downloaded(tmp_path: Path, memory: Any) -> None:
    place = begun(tmp_path / "one")
    with RunUploads(place):
        pass
    remote = RemoteFolder(URL)
    hostile = "/bucket/runs/x/../../../../evil.py"
    memory.store[hostile] = type(memory.store["/bucket/runs/x/run.json"])(memory, hostile, b"x")
    assert any("evil.py" in name for name in remote.sizes())
    with pytest.raises(StorageError, match="leads out of the folder"):
        RunPlace.of(URL, tmp_path / "two").fetch()
    assert not list(tmp_path.rglob("evil.py"))


def test_a_run_at_a_url_runs_no_code_that_it_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    evil = RunPlace.of(URL, cache).folder / "evil.py"
    remote = RemoteFolder(URL)
    remote.write("evil.py", f"open({str(tmp_path / 'ran')!r}, 'w')".encode())
    remote.write("run.json", json.dumps({"state": "running", "application": str(evil), "device": "cpu"}).encode())
    remote.write("metrics.jsonl", b"")
    remote.write(OWNER, json.dumps({"run": "1"}).encode())
    done = CliRunner().invoke(build(), ["train", "--resume", URL])
    assert isinstance(done.exception, ApplicationError)
    assert "names a file of its own, 'evil.py'" in str(done.exception)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_checkpoint_at_the_url_is_stepped_over_and_made_again(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with RunUploads(begun(tmp_path / "a", 10, 20)) as uploads:
        checkpoint_of(uploads, tmp_path / "a")
    name = "checkpoints/step-00000020/state-00000.safetensors"
    RemoteFolder(URL).write(name, b"damaged")
    other = begun(tmp_path / "b")
    assert step_here(other) == 10
    assert f"the checkpoint {URL}/checkpoints/step-00000020 is not as it was written" in caplog.text
    with RunUploads(other):
        checkpoint(other.folder, 20)
    assert RemoteFolder(URL).read(name) != b"damaged"
    assert step_here(begun(tmp_path / "c")) == 20


def checkpoint_of(uploads: RunUploads, cache: Path) -> None:
    """Upload the checkpoint before the newest, which the command did when it was the newest."""
    remote, run = RemoteFolder(URL), RunPlace.of(URL, cache).folder
    upload_checkpoint(remote, 10, run, 2, {})


def test_the_owner_at_the_url_is_named_and_an_older_attempt_completes_no_checkpoint(tmp_path: Path) -> None:
    place = begun(tmp_path / "a", 10)
    older = RunUploads(place)
    owner = json.loads(RemoteFolder(URL).read(OWNER) or b"")
    assert (owner["pid"], owner["host"], owner["attempt"]) == (os.getpid(), socket.gethostname(), 1)
    plain = older._remote.upload

    def take_over_then_send(file: Path, name: str) -> None:
        # While the large file of the checkpoint is sent, another command begins.
        if name.endswith("state-00000.safetensors"):
            RunUploads(RunPlace.of(URL, tmp_path / "b"))
        plain(file, name)

    (tmp_path / "b" / place.folder.relative_to(tmp_path / "a")).mkdir(parents=True)
    older._remote.upload = take_over_then_send  # type: ignore[method-assign]
    with pytest.raises(TrainError, match=rf"taken over the run in {URL}.*process {os.getpid()} on "), older:
        pass
    assert "checkpoints/step-00000010/state-00000.safetensors" in names()
    assert "checkpoints/step-00000010/state.json" not in names()
    assert json.loads(RemoteFolder(URL).read(OWNER) or b"")["attempt"] == 2
