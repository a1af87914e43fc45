"""The owner of a run: the lock, the number of each attempt, and what an older attempt may still name."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import TrainError
from penstock.train import run_owner
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.fit import fit
from penstock.train.parallel import watchdog
from penstock.train.parallel.world import World
from penstock.train.run_owner import (
    Launch,
    Owner,
    RunAttempt,
    RunTakenOver,
    clear_unnamed,
    newest_attempt,
    owned,
    refuse_owned,
)

HOLD = """
import os, sys, time
from pathlib import Path
from penstock.train.run_owner import owned
with owned(Path(sys.argv[1]), int(sys.argv[2]) or None):
    child = os.fork() if sys.argv[3] == "forks" else 1
    if child:
        print(child, flush=True)
    time.sleep(60)
"""
SAVE = """
import sys
from pathlib import Path
import torch
from penstock.train.checkpoint.saver import Saver
from penstock.train.parallel import watchdog
from penstock.train.parallel.world import World
from penstock.train.run_owner import owned
run = Path(sys.argv[1])
with owned(run) as attempt, Saver(run / "checkpoints", World(), attempt) as saver:
    saver.save(1, {"x": torch.ones(2)}, {})
    saver.wait()
    print("saved", flush=True)
    sys.stdin.readline()
    saver.save(2, {"x": torch.ones(2)}, {})
    saver.wait()
"""


@contextmanager
def holder(run: Path, parent: int = 0, how: str = "") -> Generator[tuple[subprocess.Popen[str], int]]:
    """Another process that owns the run."""
    command = [sys.executable, "-c", HOLD, str(run), str(parent), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            if how == "forks":
                os.kill(child, signal.SIGKILL)


def test_another_process_is_refused_and_the_owner_named(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        for _ in range(2):
            # The refused command leaves the record as it is.
            with pytest.raises(TrainError) as refused, owned(tmp_path):
                pass
            said = str(refused.value)
            assert f"process {process.pid} on {socket.gethostname()}, since 2" in said
            assert str(tmp_path) in said
            assert "python -c '" in said
            assert said.endswith("wait for its end, or give another --out.")
            with pytest.raises(TrainError, match=f"process {process.pid} "):
                refuse_owned(tmp_path)
    assert newest_attempt(tmp_path) == 1


@pytest.mark.parametrize("how", ["", "forks"])
def test_a_killed_owner_keeps_nothing_though_its_forked_process_lives(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine it looks alive for a while.
    monkeypatch.setattr(run_owner, "GRACE_S", 30.0)
    with holder(tmp_path, how=how) as (process, child):
        process.send_signal(signal.SIGKILL)
        with owned(tmp_path) as attempt:
            assert attempt.number == 2
            if how == "forks":
                os.kill(child, 0)
        refuse_owned(tmp_path)


def test_an_owner_whose_launcher_is_dead_is_waited_for(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "pass"])
    launcher.wait()
    with holder(tmp_path, parent=launcher.pid) as (process, _):
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"]).wait()
        with owned(tmp_path) as attempt:
            assert attempt.number == 2


def test_an_owner_that_lives_without_its_launcher_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_owner, "DYING_S", 0.2)
    with holder(tmp_path, parent=2**22 - 1), pytest.raises(TrainError, match="another command trains in"):
        refuse_owned(tmp_path)


@pytest.mark.thorough
def test_an_older_attempt_that_wakes_up_names_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as older:
        assert older.stdout is not None
        assert older.stdout.readline() == "saved\n"
        # As on another machine, where the lock does not reach.
        (tmp_path / ".lock").unlink()
        with owned(tmp_path) as newer:
            assert newer.number == 2
            _, said = older.communicate("go on\n", timeout=60)
            assert older.returncode == 1
            assert f"RunTakenOver: another command has taken over the run in {tmp_path}" in said
            assert f"process {os.getpid()} on " in said
            found = newest_checkpoint(tmp_path / "checkpoints")
            assert found is not None
            assert found.step == 1
            with Saver(tmp_path / "checkpoints", World(), newer) as saver:
                saver.save(2, {"x": torch.zeros(2)}, {})
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_in_every_order_a_late_checkpoint_is_found_by_the_newer_attempt_or_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_owner, "clear_unnamed", lambda checkpoints: None)

    def older(run: Path, attempt: RunAttempt) -> Iterator[None]:
        beside, place = run / "checkpoints/.step-00000001-5eed", run / "checkpoints/step-00000001"
        try:
            beside.mkdir()
            yield
            attempt.check()
            yield
            (beside / "state.json").write_text("{}")
            yield
            attempt.check()
            yield
            beside.rename(place)
        except (RunTakenOver, FileNotFoundError):
            return

    def newer(run: Path, seen: list[bool]) -> Iterator[None]:
        RunAttempt.claim(run, Owner.here())
        yield
        clear_unnamed(run / "checkpoints")
        yield
        seen.append((run / "checkpoints/step-00000001").exists())

    outcomes: set[bool] = set()
    for number, turns in enumerate(itertools.combinations(range(8), 3)):
        run, seen = tmp_path / str(number), list[bool]()
        (run / "checkpoints").mkdir(parents=True)
        one, other = older(run, RunAttempt.claim(run, Owner.here())), newer(run, seen)
        for turn in range(8):
            next(other if turn in turns else one, None)
        named = (run / "checkpoints/step-00000001").exists()
        assert seen == [named], turns
        outcomes.add(named)
    assert outcomes == {True, False}


def test_numbers_are_exclusive_and_a_folder_that_was_removed_begins_again(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.train.run_owner import RunAttempt, Owner\n"
        "for _ in range(20): print(RunAttempt.claim(Path(sys.argv[1]), Owner.here()).number)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    claiming = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    numbers = [int(line) for process in claiming for line in process.communicate()[0].split()]
    assert sorted(numbers) == list(range(1, 41))
    for number in (1, 40):
        assert json.loads((tmp_path / f".attempts/{number:08d}").read_bytes())["attempt"] == number
    last = RunAttempt.claim(tmp_path, Owner.here())
    last.check()
    (tmp_path / ".attempts/00000041").rename(tmp_path / ".attempts/00000042")
    last.check()
    (tmp_path / ".attempts/00000042").write_text("{}")
    with pytest.raises(RunTakenOver, match="its record is gone"):
        last.check()
    (tmp_path / ".attempts/00000200").write_text("{}")
    assert RunAttempt.claim(tmp_path, Owner.here()).number == 201
    assert len(list((tmp_path / ".attempts").iterdir())) == 2


@pytest.mark.parametrize("record", [b"", b"null", b"[1]", b'{"host": 1}', b"\xff"])
def test_a_record_of_something_else_names_nobody(record: bytes) -> None:
    assert Owner.parse(record) is None
    assert Owner.parse({**Owner.here().fields(), "pid": -1}) is None
    assert Owner.parse(Owner.here(attempt=3).fields()) == Owner.here(attempt=3)


def test_penstock_fit_owns_its_folder_too(tmp_path: Path) -> None:
    inputs, targets = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    with holder(tmp_path), pytest.raises(TrainError, match="another command trains in"):
        fit(nn.Linear(4, 2), (inputs, targets), out=tmp_path, quiet=True, steps=2)
    # The holder was killed.
    fit(nn.Linear(4, 2), (inputs, targets), out=tmp_path, quiet=True, steps=2)
    assert newest_attempt(tmp_path) == 2


def test_a_run_that_was_taken_over_writes_no_metrics(tmp_path: Path) -> None:
    inputs, targets = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)

    def take_over(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        RunAttempt.claim(tmp_path, Owner.here())
        return outputs.sum()

    with pytest.raises(RunTakenOver):
        fit(
            nn.Linear(4, 2),
            (inputs, targets),
            validation=(inputs, targets),
            metrics={"taken": take_over},
            out=tmp_path,
            quiet=True,
            steps=2,
        )
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert json.loads((tmp_path / "run.json").read_bytes())["state"] == "running"


HOLD_LAUNCH = """
import sys, time
from pathlib import Path
from penstock.train.run_owner import Launch, owned
with owned(Path(sys.argv[1]), launch=Launch.parse(sys.argv[2])) as attempt:
    print("owns", flush=True)
    while True:
        time.sleep(0.02)
        if sys.argv[3] == "looks":
            attempt.check()
"""


@contextmanager
def started(run: Path, launch: str, how: str) -> Generator[subprocess.Popen[str]]:
    """A start of a launch in another process, which looks for newer attempts or holds still."""
    command = [sys.executable, "-c", HOLD_LAUNCH, str(run), launch, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owns\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_later_start_of_a_launch_takes_the_run_from_an_earlier_one_that_lives(tmp_path: Path) -> None:
    with started(tmp_path, "t/1", "looks") as earlier:
        with owned(tmp_path, launch=Launch(token="t", start=2)) as attempt:
            assert attempt.number == 2
            assert earlier.wait(timeout=30) == 1
            assert earlier.stderr is not None
            assert "another command has taken over the run in" in earlier.stderr.read()
            attempt.check()
        # It held the lock: nobody else may have it meanwhile.
        with started(tmp_path, "u/1", "holds"), pytest.raises(TrainError, match="another command trains in"):
            refuse_owned(tmp_path)


def test_an_earlier_start_that_holds_still_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_owner, "OVERTAKE_S", 0.2)
    with started(tmp_path, "t/1", "holds"):
        with owned(tmp_path, launch=Launch(token="t", start=2)) as second:
            assert "still holds the lock" in caplog.text
            second.check()
            # Its own third start finds the second in the record of the lock that the first one holds.
            with owned(tmp_path, launch=Launch(token="t", start=3)) as third:
                third.check()
                with pytest.raises(RunTakenOver):
                    second.check()
        # A command of its own is refused, and so is another launch.
        for launch in (None, Launch(token="u", start=9)):
            with pytest.raises(TrainError, match="another command trains in"), owned(tmp_path, launch=launch):
                pass


def test_an_earlier_start_that_comes_late_gets_no_number(tmp_path: Path) -> None:
    with owned(tmp_path, launch=Launch(token="t", start=2)):
        pass
    with pytest.raises(RunTakenOver), owned(tmp_path, launch=Launch(token="t", start=1)):
        pass
    assert newest_attempt(tmp_path) == 1
    # Another command is no start of that launch.
    with owned(tmp_path, launch=Launch(token="u", start=1)) as attempt:
        assert attempt.number == 2


@pytest.mark.parametrize("text", ["", "t", "t/", "/1", "t/x", "t/-1"])
def test_a_launch_that_is_none_is_refused(text: str) -> None:
    assert Launch.parse("a/b/7") == Launch(token="a/b", start=7)
    assert str(Launch(token="a", start=7)) == "a/7"
    with pytest.raises(TrainError, match="it must be a token, a slash and a whole number"):
        Launch.parse(text)


def test_a_process_whose_run_was_taken_over_ends_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "FENCE_POLL_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    older = RunAttempt.claim(tmp_path, Owner.here())
    with watchdog.Watchdog(World(), attempt=older):
        time.sleep(0.2)
        assert not ended
        RunAttempt.claim(tmp_path, Owner.here())
        deadline_s = time.monotonic() + 20
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ended[0] == 2
    assert "penstock: another command has taken over the run in" in capsys.readouterr().err
