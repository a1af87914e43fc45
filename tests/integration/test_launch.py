"""Processes that train together: who is at fault when one ends, and what is said of it. The processes are tiny here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import PeersLost, TrainError
from penstock.train.parallel import rank_process
from penstock.train.parallel import watchdog as watchdog_module
from penstock.train.parallel.launch import launch
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.parallel.world import World, device_of, split_rows

PRELUDE = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"


def run(code: str, processes: int = 3) -> None:
    launch([sys.executable, "-c", PRELUDE + code], processes, os.environ)


def failure(code: str, processes: int = 3) -> str:
    with pytest.raises(TrainError) as failed:
        run(code, processes)
    return str(failed.value)


def test_each_knows_its_rank_and_all_end_well(tmp_path: Path) -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PENSTOCK_PARENT")
    run(f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names!r}))")
    assignments = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    ports = {assigned[4] for assigned in assignments}
    assert len(ports) == 1
    assert [assigned[:4] for assigned in assignments] == [["3", str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert {assigned[5] for assigned in assignments} == {str(os.getpid())}


def test_one_that_is_killed_ends_the_others_and_is_named() -> None:
    started = time.monotonic()
    said = failure("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")
    assert said.startswith("rank 1 of 3 (process ")
    assert said.endswith("was ended by SIGKILL; the others were ended.")
    assert time.monotonic() - started < 30


@pytest.mark.thorough
def test_who_lost_the_others_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[launch.__module__], "SETTLE_S", 60.0)
    # The first one notices before the culprit has ended.
    code = "if rank == 0: sys.stderr.write('penstock: rank 0 waited\\n'); sys.exit(3)\n"
    code += "if rank == 1: time.sleep(1.0); sys.stderr.write('penstock: the loss is nan at step 7.\\n'); sys.exit(2)\n"
    assert failure(code + "time.sleep(60)") == "the loss is nan at step 7."
    monkeypatch.setattr(sys.modules[launch.__module__], "SETTLE_S", 1.0)
    # Where nobody else ended, what it says is all that is known.
    assert failure("if rank == 0: sys.stderr.write('penstock: rank 0 waited\\n'); sys.exit(3)\ntime.sleep(60)") == (
        "rank 0 waited"
    )


def test_a_crash_is_named_by_its_last_words_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    said = failure("if rank == 2: raise ValueError('no such thing')\ntime.sleep(60)")
    assert "rank 2 of 3" in said
    assert "ended with status 1 (ValueError: no such thing); the others were ended." in said
    assert "[rank 2] Traceback" in capfd.readouterr().err


def test_the_error_before_a_note_on_what_a_metric_was_given_is_said() -> None:
    note = "The metric 'm' was given outputs float32[3] and targets int64[3]."
    raised = f"error = ValueError('no such thing'); error.add_note({note!r}); raise error"
    said = failure(f"if rank == 2:\n    {raised}\ntime.sleep(60)")
    assert f"ended with status 1 (ValueError: no such thing; {note}); the others were ended." in said


def test_last_words_that_are_read_late_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = rank_process._lines

    def late(source: Any) -> Iterator[str]:
        time.sleep(1.3)
        yield from lines(source)

    monkeypatch.setattr(rank_process, "_lines", late)
    assert failure("sys.stderr.write('penstock: the loss is nan.\\n'); sys.exit(2)", 1) == "the loss is nan."


def test_nobody_else_gets_the_port_of_the_processes() -> None:
    code = "import socket\nplace = ('127.0.0.1', int(os.environ['MASTER_PORT']))\n"
    code += "try:\n    socket.socket().bind(place)\nexcept OSError:\n    socket.create_server(place).close()\n"
    run(f"{code}else:\n    sys.exit(2)", 1)


def test_asked_to_stop_all_stop(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom penstock.train.parallel.launch import launch\n"
        f"inner = {PRELUDE!r} + '''\n"
        "def stop(number, frame): sys.exit(130)\n"
        f"signal.signal(signal.SIGINT, stop)\nopen(f'{tmp_path}/{{rank}}', 'w').close()\ntime.sleep(60)\n'''\n"
        "try:\n    launch([sys.executable, '-c', inner], 2, os.environ)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while len(list(tmp_path.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=30) == 130


@pytest.mark.thorough
def test_asked_to_stop_the_one_that_writes_is_given_its_time(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom penstock.train.parallel import launch\nlaunch.SETTLE_S = 0.1\n"
        f"inner = {PRELUDE!r} + '''\n"
        "def stop(number, frame):\n"
        f"    if rank == 0: time.sleep(1.5); open('{tmp_path}/written', 'w').close()\n"
        "    sys.exit(130)\n"
        f"signal.signal(signal.SIGINT, stop)\nopen(f'{tmp_path}/{{rank}}', 'w').close()\ntime.sleep(60)\n'''\n"
        "try:\n    launch.launch([sys.executable, '-c', inner], 2, os.environ)\n"
        "except KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while len(list(tmp_path.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=60) == 130
    assert (tmp_path / "written").exists()


def test_a_sentence_in_colours_is_found() -> None:
    code = r"sys.stderr.write('\x1b[1;31mpenstock:\x1b[0m the loss is nan.\n'); sys.exit(2)"
    assert failure(code, 1) == "the loss is nan."


def test_if_one_cannot_be_started_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*given: Any, **named: Any) -> Any:
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(real(*given, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert failure("time.sleep(60)", 2) == (
        "process 1 of 2 cannot be started (Resource temporarily unavailable); request fewer processes."
    )
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 100ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (RuntimeError("expected a tensor of 3 numbers"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (torch.AcceleratorError("CUDA error: device-side assert; no connection"), False),
    ],
)
def test_only_what_comes_of_the_others_is_put_on_them(error: RuntimeError, lost: bool) -> None:
    with pytest.raises(PeersLost if lost else type(error)) as raised, World().operation("the sum of the losses"):
        raise error
    assert isinstance(raised.value, PeersLost) == lost


def test_whose_connection_broke_is_said_first() -> None:
    said = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [198.18.0.2]:46285"
    with (
        pytest.raises(PeersLost, match=r"did not arrive \(Connection closed by peer \[198\.18\.0\.2\]:46285\)"),
        World().operation("x"),
    ):
        raise RuntimeError(said)


def test_each_operation_that_ends_is_getting_on_and_who_is_alone_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, ended = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(os, "_exit", ended.append)
    group: Any = object()
    together = World(0, 2, group=group, timeout_s=10)
    watchdog = Watchdog(together)
    now_s[0] = 114.0
    with together.operation("the all-gather of the outputs"):
        pass
    now_s[0] = 120.0
    watchdog.check()
    assert not ended
    watchdog.pause("the bundle")
    now_s[0] = 999.0
    watchdog.check()
    assert not ended
    watchdog.beat("step 8")
    now_s[0] = 1999.0
    watchdog.check()
    assert ended == [3]


@pytest.mark.parametrize(("device", "ends"), [("cuda", True), ("cpu", False)])
def test_on_gpus_the_watchdog_is_before_nccl_and_on_cpus_behind_gloo(
    device: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, ended = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(os, "_exit", ended.append)
    group: Any = object()
    watchdog = Watchdog(World(0, 2, torch.device(device), group=group, timeout_s=10))
    watchdog.beat("step 8")
    now_s[0] = 111.0
    watchdog.check()
    assert bool(ended) == ends


@pytest.mark.parametrize(("rank", "size", "local"), [(-1, 2, 0), (2, 2, 0), (0, 2, 1), (0, 1, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int, local: int) -> None:
    with pytest.raises(TrainError, match="ranks begin at 0 and stay below the counts"):
        RankAssignment(rank=rank, size=size, local_rank=local, local_size=2 if size == 1 else 1, address="here", port=1)


def test_more_gpus_than_there_are_are_refused() -> None:
    there = torch.cuda.device_count()
    with pytest.raises(TrainError, match=f"{there + 1} GPUs are requested and torch sees {there}"):
        device_of(None, cuda=True, wanted=there + 1)
    assert device_of(None, cuda=False, wanted=there + 1) == torch.device("cpu")


def test_rows_are_split_as_evenly_as_can_be() -> None:
    assert split_rows(16, 4) == (4, 4, 4, 4)
    assert split_rows(15, 4) == (4, 4, 4, 3)
    assert split_rows(1, 2) == (1, 0)


def test_a_process_that_does_not_get_on_is_ended_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog_module, "POLL_S", 0.02)
    monkeypatch.setattr(os, "_exit", ended.append)
    group: Any = object()
    together = World(1, 2, group=group, timeout_s=0.1)
    watchdog = Watchdog(together)
    watchdog.beat("step 7")
    with watchdog:
        deadline_s = time.monotonic() + 20
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ended[0] == 3
    said = capsys.readouterr().err
    assert "rank 1 of 2 made no progress for" in said
    assert "in step 7; it is ended" in said


def test_a_process_whose_parent_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog_module, "POLL_S", 0.02)
    monkeypatch.setattr(os, "_exit", ended.append)
    group: Any = object()
    with Watchdog(World(0, 2, group=group), parent=os.getppid() + 1):
        deadline_s = time.monotonic() + 20
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ended[0] == 3


def test_what_is_held_is_let_go_before_a_process_leaves_and_is_kept_alive_by_nobody() -> None:
    class Held:
        def __init__(self) -> None:
            self.gone = 0

        def let_go(self) -> None:
            self.gone += 1

    alone, kept, forgotten = World(), Held(), Held()
    alone.on_leave(kept.let_go)
    alone.on_leave(forgotten.let_go)
    del forgotten
    alone.leave()
    alone.leave()
    assert kept.gone == 1
