"""Heartbeats of the processes of a Slurm job, and what follows where they stop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cluster import heartbeat, slurm_batch, slurm_engine
from penstock.cluster.heartbeat import Silence, beating
from penstock.cluster.job import ClusterJob
from penstock.cluster.outcome import RankOutcome
from penstock.cluster.slurm_batch import KINDS
from penstock.cluster.slurm_engine import BATCH_BEAT, SlurmJob, beat_file
from penstock.core.errors import ClusterError
from penstock.core.source_files.find_application import find_application
from tests.support.clock import Clock

LIMIT_S = 30.0
BEATS = """
import os, sys, time
from pathlib import Path
from penstock.cluster.heartbeat import beating
with beating(Path(sys.argv[1])):
    time.sleep(60)
"""
# It runs for ever, until it is put back; then it is done.
SCONTROL = """#!/bin/sh
echo "$1 $3" >> {folder}/asked
[ "$1" = requeue ] && {{ touch {folder}/back; exit 0; }}
if [ -e {folder}/back ]; then state=COMPLETED; else state=RUNNING; fi
echo "JobId=7 JobState=$state Reason=None BatchHost=n4"
"""


def eventually(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def processes_of(file: Path) -> list[str]:
    said = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if f"heartbeat.py {file}" in line]


def test_a_process_beats_until_its_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    with beating(file):
        eventually(file.exists)
        assert len(processes_of(file)) == 1
    assert processes_of(file) == []


@pytest.mark.thorough
def test_heartbeats_end_with_a_killed_process(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    with subprocess.Popen([sys.executable, "-c", BEATS, str(file)]) as process:
        eventually(lambda: file.exists() and file.read_text() != "")
        assert file.read_text().split() == [str(process.pid), "0"]
        eventually(lambda: file.read_text().split()[1:] == ["1"])
        assert len(processes_of(file)) == 1
        process.kill()
    eventually(lambda: processes_of(file) == [])


def test_silence_is_counted_in_looks(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    file.write_text("of an earlier process 9")
    silence = Silence(file, heartbeat.BEGIN_S / 5)
    assert [silence.is_lost() for _ in range(5)] == [False] * 4 + [True]
    silence.begin()
    assert not silence.is_lost()
    silence = Silence(file, heartbeat.SILENT_S / 3)
    for count in range(9):
        file.write_text(str(count))
        assert not silence.is_lost()
        assert not silence.is_lost()
    assert [silence.is_lost() for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("others", ["ended", "alive", "none"])
def test_srun_is_ended_where_nobody_is_left(others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(slurm_batch, "POLL_S", slurm_batch.BEAT_S)
    beat_file(tmp_path, 0).write_text("1 1")
    done = RankOutcome(rank=1, host="h", status=0)
    if others == "ended":
        (tmp_path / "rank-1.json").write_text(done.text())
    # It ends with its standard input.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as srun:
        assert srun.stdin is not None
        sink, over_s = srun.stdin, clock.now_s + 2 * heartbeat.BEGIN_S

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if others == "alive":
                # As the other task does; srun ends after it.
                beat_file(tmp_path, 1).write_text(f"1 {clock.now_s}")
                if clock.now_s > over_s:
                    sink.close()

        monkeypatch.setattr(slurm_batch, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
        slurm_batch._wait(srun, tmp_path, KINDS["score"], 1 if others == "none" else 2)
    assert srun.returncode == (0 if others == "alive" else -signal.SIGKILL)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_whose_first_machine_is_lost_goes_back(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("sbatch", "#!/bin/sh\necho 7\n"), ("scontrol", SCONTROL), ("scancel", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_engine, "POLL_S", 0.01)
    for name in ("SILENT_S", "BEGIN_S"):
        monkeypatch.setattr(heartbeat, name, 0.05)
    job = ClusterJob(token="t", size=1, device="cpu", cores=1, working_folder=str(tmp_path), sources={})
    file = job.write(tmp_path / "jobs", find_application("digits"))
    file.with_name(BATCH_BEAT).write_text("1 1")
    said: list[str] = []
    says = "is gone from its first machine, n4, and was cancelled" if restarts == 0 else "ended as COMPLETED"
    with pytest.raises(ClusterError, match=says):
        SlurmJob(file, restarts, tmp_path).wait(said.append)
    assert said == ["Slurm's job 7 is gone from its first machine, n4; it goes back into the queue."] * restarts
    assert (tmp_path / "asked").read_text().split().count("requeue") == restarts
