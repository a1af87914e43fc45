"""Processes in /proc: any name, those that ended, and the CPU time."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.machine.process_stat import ProcessStat, cpu_seconds, is_running, read_stat
from tests.support.processes import eventually

GONE = 1 << 30


@contextmanager
def waiting_process(name: bytes) -> Generator["subprocess.Popen[bytes]"]:
    """A process with a name that ends when its standard input does."""
    code = f"open('/proc/self/comm', 'wb').write({name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@pytest.mark.parametrize("name", [b"a b", b"a) R 1 (b", b")", b"((", b"\xff\xfe)", b"a\nb) Z 1"])
def test_a_name_may_hold_any_bytes(name: bytes) -> None:
    with waiting_process(name) as process:
        assert Path(f"/proc/{process.pid}/comm").read_bytes().startswith(name)
        # Then it waits for its input.
        eventually(lambda: (stat := read_stat(process.pid)) is not None and stat.state == "S", within_s=20)
        stat = read_stat(process.pid)
        assert stat is not None
        assert stat.parent == os.getpid()
        assert is_running(process.pid)


def test_a_process_that_ended_and_was_not_waited_for_does_not_run() -> None:
    with waiting_process(b"ends") as process:
        before = read_stat(process.pid)
        assert before is not None
        assert not before.exiting
        process.kill()
        eventually(lambda: not is_running(process.pid), within_s=10.0)
        after = read_stat(process.pid)
        assert after is not None
        assert (after.state, after.ended, after.exiting) == ("Z", True, True)
    assert read_stat(process.pid) is None
    assert not is_running(process.pid)


def test_a_process_that_ends_is_exiting_before_it_has_ended() -> None:
    exiting = ProcessStat(state="D", parent=1, flags=0x40404C, cpu_s=0.0)
    assert exiting.exiting
    assert not exiting.ended
    assert not ProcessStat(state="D", parent=1, flags=0x404048, cpu_s=0.0).exiting


def test_another_folder_of_processes(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a b) (c) D 3 {'0 ' * 4}{0x404048} {'0 ' * 4}200 100 0 0\n")
    expected = ProcessStat(state="D", parent=3, flags=0x404048, cpu_s=300 / os.sysconf("SC_CLK_TCK"))
    assert read_stat(7, tmp_path) == expected
    assert read_stat(8, tmp_path) is None


def test_no_such_process() -> None:
    assert read_stat(GONE) is None
    assert not is_running(GONE)
    assert cpu_seconds(GONE) == 0.0


def test_cpu_time_of_a_process() -> None:
    before_s = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) < before_s + 0.05:
        pass
    # The kernel's other count of the same; that of this process goes on in between.
    times = os.times()
    assert cpu_seconds(os.getpid()) == pytest.approx(times.user + times.system, abs=0.1)
