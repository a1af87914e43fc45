"""Training on a cluster, without one: the ranks, what is shipped, and what follows from the ends of the processes."""

import builtins
import dis
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.launch_options import cluster_options
from penstock.cluster import cluster_engine as engine_module
from penstock.cluster import machine_report, rank_task, slurm_engine
from penstock.cluster.cluster_engine import ClusterEngine, run_on
from penstock.cluster.job import SOURCES, ClusterJob, unpack_sources
from penstock.cluster.outcome import Next, RankOutcome, StartsSoFar, limited, verdict
from penstock.cluster.rank_task import run_rank
from penstock.cluster.slurm_engine import read_state, write_state
from penstock.cluster.task_checks import places_of
from penstock.cluster.units_engine import units_task
from penstock.core.errors import ClusterError, TrainError
from penstock.core.source_files.find_application import find_application
from penstock.train.parallel.rank_assignment import RankAssignment, RankPlace, assign_ranks, rank_assignment

ALONE = RankAssignment(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=1)
APPLICATION = """
import beside
from penstock import Application, TensorSpec

app = Application(
    name="shipped",
    input=TensorSpec(dtype="float32", shape=(2,), meaning="two numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="two numbers", name="output"),
    model=":make",
)


def make():
    return beside.MADE
"""


def outcome(rank: int, status: int, sentence: str = "", output: Sequence[str] = ()) -> RankOutcome:
    return RankOutcome(rank=rank, host="h", status=status, sentence=sentence, output=output)


def job(**more: Any) -> ClusterJob:
    fields: dict[str, Any] = {
        "token": "t",
        "arguments": ["train", "digits"],
        "size": 2,
        "device": "cpu",
        "cores": 1,
        "working_folder": "/",
        "environment": {},
        "sources": {},
    }
    return ClusterJob(**fields | more)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.booleans())
def test_ranks_of_tasks_are_read_again_from_the_environment_that_they_pass_on(machines: list[str], gpu: bool) -> None:
    places = [
        RankPlace(machine=each, address=f"10.0.0.{ord(each)}", port=7000 + rank, has_own_gpu=gpu)
        for rank, each in enumerate(machines)
    ]
    assigned = assign_ranks(places)
    assert [rank_assignment(each.environment()) for each in assigned] == assigned
    assert [each.rank for each in assigned] == list(range(len(machines)))
    assert {(each.address, each.port) for each in assigned} == {(places[0].address, 7000)}
    for machine in set(machines):
        own = [each for each, name in zip(assigned, machines, strict=True) if name == machine]
        assert [each.local_rank for each in own] == list(range(len(own)))
        assert {each.local_size for each in own} == {len(own)}


@pytest.mark.parametrize(
    ("ends", "size", "follows", "says"),
    [
        ([outcome(1, 0), outcome(0, 0)], 2, Next.DONE, ""),
        # Its own failure comes before what it did to the others.
        ([outcome(0, 3, "lost"), outcome(1, 2, "the loss is nan.")], 2, Next.FAILED, "the loss is nan."),
        ([outcome(0, -9, "killed"), outcome(1, 1, "crashed")], 2, Next.FAILED, "crashed"),
        ([outcome(0, 3, "lost"), outcome(1, -9, "rank 1 was ended")], 2, Next.AGAIN, "rank 1 was ended"),
        ([outcome(0, 3, "lost")], 2, Next.AGAIN, "1 of 2 processes are gone"),
        ([], 3, Next.AGAIN, "3 of 3 processes are gone"),
        ([outcome(0, 3, "rank 0 waited"), outcome(1, 3, "rank 1 waited")], 2, Next.AGAIN, "rank 0 waited"),
        # Nobody asked them to stop.
        ([outcome(0, 130, "stopped"), outcome(1, 130, "stopped")], 2, Next.AGAIN, "stopped"),
        # It may have ended well before the last one was lost; the next start says so.
        ([outcome(0, 0)], 2, Next.AGAIN, "1 of 2 processes are gone"),
    ],
)
def test_only_what_would_fail_again_fails(ends: Sequence[RankOutcome], size: int, follows: Next, says: str) -> None:
    found = verdict(ends, size)
    assert found.next is follows
    assert found.sentence.startswith(says)
    assert bool(found.sentence) == bool(says)


def test_restarts_are_limited_only_while_they_bring_nothing() -> None:
    again = verdict([outcome(0, -9, "killed.")], 1)
    progress = StartsSoFar()
    for step in (10, 20, 30, 30, 30):
        progress = progress.after(step)
        assert limited(again, progress, 2) is again
    assert (progress.start, progress.fruitless, progress.step) == (5, 2, 30)
    progress = progress.after(30)
    found = limited(again, progress, 2)
    assert found.next is Next.FAILED
    assert found.sentence == "killed. It was started 3 times without a new checkpoint."
    # One that got on begins to count anew.
    assert limited(again, progress.after(40), 2) is again


class Scripted(ClusterEngine):
    """Gives outcomes in turn, and takes the run to a step in each start."""

    def __init__(self, *starts: tuple[Sequence[RankOutcome], int]) -> None:
        self._starts = list(starts)
        self.step, self.numbers = -1, list[int]()

    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """See `ClusterEngine`."""
        ends, self.step = self._starts.pop(0)
        self.numbers.append(start)
        return ends


def test_a_run_is_started_again_until_it_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_module, "PAUSE_S", 0)
    said: list[str] = []
    killed = [outcome(0, -9, "rank 0 was killed."), outcome(1, 3, "lost")]
    done = [outcome(1, 0), outcome(0, 0, output=("Bundle: b",))]
    scripted = Scripted((killed, -1), (killed, 20), (done, 60))
    output = run_on(scripted, tmp_path, 2, 1, lambda: scripted.step, said.append)
    assert list(output) == ["Bundle: b"]
    assert scripted.numbers == [1, 2, 3]
    assert said == [
        "rank 0 was killed. Start 2 goes on from the beginning.",
        "rank 0 was killed. Start 3 goes on from the checkpoint of step 20.",
    ]
    failing = Scripted((killed, 20), ([outcome(0, 2, "the loss is nan.")], 20))
    with pytest.raises(ClusterError, match=r"^the loss is nan\.$"):
        run_on(failing, tmp_path, 2, 1, lambda: failing.step, said.append)
    stuck = Scripted((killed, -1))
    with pytest.raises(ClusterError, match=r"^rank 0 was killed\.$"):
        run_on(stuck, tmp_path, 2, 0, lambda: stuck.step, said.append)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "app.py").write_text(APPLICATION)
    (folder / "beside.py").write_text("MADE = 1\n")
    return folder / "app.py"


def test_sources_are_shipped_and_taken_where_a_machine_has_others(user: Path, tmp_path: Path) -> None:
    file = job().write(tmp_path / "cluster", find_application(str(user)))
    written = ClusterJob.read(file)
    assert written.application == str(user)
    assert sorted(written.sources) == ["app.py", "beside.py"]
    assert unpack_sources(written, file, tmp_path / "unused") is None
    user.with_name("beside.py").write_text("MADE = 2\n")
    copy = unpack_sources(written, file, tmp_path / "copy")
    assert copy == tmp_path / "copy" / "app.py"
    sys.modules.pop("beside", None)
    found = find_application(str(user), copy)
    # Its name is that of its own place, its code the shipped one.
    assert found.reference == str(user)
    assert found.model() == 1
    assert found.source_sha256() == written.sources
    sys.modules.pop("beside", None)
    user.unlink()
    assert unpack_sources(written, file, tmp_path / "other") == tmp_path / "other" / "app.py"
    file.with_name(SOURCES).write_bytes(b"PK")
    with pytest.raises(ClusterError, match=r"sources\.zip is damaged; give the command again"):
        unpack_sources(written, file, tmp_path / "third")


def test_nothing_is_shipped_of_an_installed_application(tmp_path: Path) -> None:
    file = job().write(tmp_path, find_application("digits"))
    assert ClusterJob.read(file).application == ""
    assert not file.with_name(SOURCES).exists()


def test_another_version_of_penstock_is_refused(tmp_path: Path) -> None:
    file = replace(job(), version="9.9").write(tmp_path, find_application("digits"))
    found = run_rank(file, 1, ALONE)
    assert (found.status, found.is_own_failure) == (2, True)
    assert "and the command was given by 9.9; install the same version on all machines." in found.sentence


def test_a_rank_runs_the_command_with_its_own_rank_and_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys\nnames = ('RANK', 'WORLD_SIZE', 'PENSTOCK_LAUNCH', 'GIVEN')\n"
        "print('early')\nprint(*(os.environ[name] for name in names), os.getcwd())\n"
        "if 'FAILS' in os.environ:\n    sys.stderr.write('penstock: it is wrong.\\n')\n    sys.exit(2)\n"
    )
    (tmp_path / "penstock.py").write_text(code)
    written = job(working_folder=str(tmp_path), environment={"GIVEN": "yes"}, token="tt")
    file = written.write(tmp_path / "cluster", find_application("digits"))
    assignment = replace(ALONE, rank=1, size=2)
    found = run_rank(file, 3, assignment)
    assert (found.status, found.sentence) == (0, "")
    assert list(found.output) == ["early", f"1 2 tt/3 yes {tmp_path}"]
    assert RankOutcome.parse(found.text()) == replace(found, output=list(found.output))
    monkeypatch.setattr(rank_task, "SETTLE_S", 0.0)
    found = run_rank(file, 3, assignment, {**os.environ, "FAILS": "1"})
    assert (found.status, found.sentence) == (2, "it is wrong.")


def place(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"host": "n1", "python": "/bin/python3", "missing": [], "job": "/run/job.json"}
    return fields | {"unseen": [], "machine": "m", "address": "a", "port": 1, "has_own_gpu": False} | more


def test_a_machine_that_cannot_train_is_named() -> None:
    assert places_of([place(), place(port=2)])[1] == RankPlace(machine="m", address="a", port=2)
    with pytest.raises(ClusterError, match=r"on n2 \(/bin/python3\) has no penstock and no torch; install the same"):
        places_of([place(), place(host="n2", missing=["penstock", "torch"])])
    with pytest.raises(ClusterError, match=r"^n2, n3 does not see /run/job\.json; give an --out in a folder that all"):
        places_of([place(), *(place(host=host, unseen=["/run/job.json", "/in"]) for host in ("n3", "n2"))])
    with pytest.raises(ClusterError, match=r"^n3 does not see /bundle; put it into a folder that all machines share\."):
        places_of([place(), place(host="n3", unseen=["/bundle"])])


def test_a_task_reports_its_machine_where_there_is_no_penstock(tmp_path: Path) -> None:
    """By the text of its module, as Slurm does, and by a function that engines pickle by value."""
    seen, unseen = tmp_path / "job.json", tmp_path / "gone"
    seen.touch()
    asked = {"job": str(seen), "paths": [str(unseen)], "needed": ["json", "penstock", "no_such_module"]}
    text = Path(machine_report.__file__).read_text()
    # Isolated, and so without Penstock, which is no installed package here.
    ran = subprocess.run(
        [sys.executable, "-ISc", text, json.dumps(asked)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == machine_report.EXIT_UNFIT, ran.stderr
    here = {"host": socket.gethostname(), "job": str(seen), "unseen": [str(unseen)]}
    found = json.loads(ran.stdout)
    assert Path(found.pop("python")).name.startswith("python")
    assert found == here | {"missing": ["penstock", "no_such_module"], "fit": False}
    report = machine_report.machine_report(str(seen), [], ["json"])
    assert report()["fit"]
    # What pickle writes by value: it is nested, and names nothing of its module.
    for function in (report, units_task(report), units_task(report, kept=True)):
        assert "<locals>" in function.__qualname__
        names = {each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"}
        assert names <= set(dir(builtins))


def test_the_state_of_a_slurm_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    assert read_state(file) == (None, StartsSoFar())
    found, progress = verdict([outcome(0, 3, "lost")], 1), StartsSoFar(start=2, fruitless=1, step=30)
    write_state(file, found, progress)
    assert read_state(file) == (replace(found, output=[]), progress)
    assert json.loads((tmp_path / "state.json").read_text())["verdict"]["next"] == "again"


# Slurm's commands, of which sbatch runs the job at once, with two tasks in each step.
SBATCH = """#!/bin/sh
for last; do :; done
sh "$last" >&2
echo "$?" > "$(dirname "$last")/status"
echo 7
"""
SRUN = """#!/bin/sh
[ "$1" = --kill-on-bad-exit=0 ] && shift || exit 9
worst=0
for rank in 0 1; do SLURM_PROCID=$rank "$@" || worst=$?; done
exit $worst
"""
SCONTROL = """#!/bin/sh
echo "JobId=7 JobState=FAILED Reason=NonZeroExitCode"
"""


@pytest.mark.thorough
def test_a_slurm_job_looks_for_torch_on_each_machine_before_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_engine, "POLL_S", 0.0)
    monkeypatch.setattr(slurm_engine, "NEEDED", ("json", "no_such_module"))
    file = job(working_folder=str(tmp_path)).write(tmp_path / "lacking", find_application("digits"))
    submitted = slurm_engine.SlurmJob(file, 0, tmp_path)
    # The ranks are not started.
    assert file.with_name("status").read_text() == "2\n"
    assert len(file.with_name("machines.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ClusterError, match=r"/python\) has no no_such_module; install the same environment"):
        submitted.wait(lambda line: None)
    # A folder that is not everywhere is named too.
    monkeypatch.setattr(slurm_engine, "NEEDED", ("json",))
    unseen = job(working_folder=str(tmp_path), paths=[str(tmp_path), "/data/in"])
    file = unseen.write(tmp_path / "unseen", find_application("digits"))
    submitted = slurm_engine.SlurmJob(file, 0, tmp_path)
    with pytest.raises(ClusterError, match=rf"^{socket.gethostname()} does not see /data/in; put it into a folder"):
        submitted.wait(lambda line: None)
    # With all modules the batch goes on to them, and has no Slurm job here.
    file = job(working_folder=str(tmp_path)).write(tmp_path / "whole", find_application("digits"))
    submitted = slurm_engine.SlurmJob(file, 0, tmp_path)
    assert list((file.parent / "start-1").glob("*")) == []
    with pytest.raises(ClusterError, match=r"^2 of 2 processes are gone with their machine"):
        submitted.wait(lambda line: None)


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ({}, {}, "--on slurm needs the number of processes on all machines together"),
        ({"gpus": 1, "processes": 1}, {}, "--gpus 1 and --processes 1 contradict each other"),
        ({"processes": 0}, {}, "0 processes are requested"),
        ({"processes": 2}, {"RANK": "0", "WORLD_SIZE": "2"}, "a launcher started this process as one of several"),
    ],
)
def test_a_command_for_a_cluster_that_contradicts_itself(
    options: dict[str, int], environment: dict[str, str], says: str
) -> None:
    given: dict[str, Any] = {"device": None, "gpus": None, "processes": None, "timeout_s": None} | options
    with pytest.raises(TrainError, match=says):
        cluster_options("slurm", **given, environment=environment)
    # The cores of this machine do not limit a cluster.
    assert cluster_options("slurm", None, 4096, None, None, {}).count == 4096
