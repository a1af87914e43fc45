"""Processor time of other processes: what is counted, and what is not."""

import os
from pathlib import Path

import pytest

from penstock.bench.chaos import other_processes
from penstock.bench.chaos.other_processes import OtherProcesses

OWN = 50
# Ticks of a second.
TICKS = os.sysconf("SC_CLK_TCK")


def write(folder: Path, pid: int, parent: int, ticks: int, name: bytes = b"python") -> None:
    (folder / str(pid)).mkdir(exist_ok=True)
    # User and system time are the 14th and the 15th field; a name may hold anything.
    fields = f" S {parent} {'0 ' * 9}{ticks - 1} 1 0 0\n".encode()
    (folder / str(pid) / "stat").write_bytes(b"%d (%s)%s" % (pid, name, fields))


def test_others_are_counted_and_own_and_kernel_threads_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(other_processes.time, "monotonic", lambda: now_s[0])
    (tmp_path / "self").mkdir()
    write(tmp_path, 1, 0, 10)
    write(tmp_path, 2, 0, 10, b"kthreadd")
    write(tmp_path, 3, 2, 10, b"ksoftirqd/0")
    write(tmp_path, OWN, 1, 10)
    write(tmp_path, 51, OWN, 10)
    write(tmp_path, 52, 51, 10, b"a) (name \xff")
    write(tmp_path, 60, 1, 10)
    others = OtherProcesses(OWN, tmp_path)
    for pid, parent in ((3, 2), (OWN, 1), (51, OWN), (52, 51)):
        write(tmp_path, pid, parent, 500)
    others.look()
    assert others.cores == 0.0
    # What it had used before does not count; all that a new one has used does.
    write(tmp_path, 60, 1, 60)
    write(tmp_path, 61, 60, 30)
    now_s[0] = 102.0
    others.look()
    assert others.cores == pytest.approx((50 + 30) / TICKS / 2)
    (tmp_path / "61" / "stat").unlink()
    (tmp_path / "61").rmdir()
    others.look()
    assert others.cores == pytest.approx((50 + 30) / TICKS / 2)
