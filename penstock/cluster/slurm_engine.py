"""Slurm: a batch job that runs one srun task for each process, and puts itself back into the queue.

FOLDER/TOKEN/job.log          what the job prints, of all its starts
FOLDER/TOKEN/state.json       what follows from its last start, written by `slurm_batch`
FOLDER/TOKEN/batch.beat       heartbeats of `slurm_batch`
FOLDER/TOKEN/machines.jsonl   the `machine_report` of each task, printed by the job's first step

Here is the command that submits the job, follows it and ends as it does. Its own end, unless by Ctrl-C, does not end
the job. Partition, account and time limit are those of Slurm's variables, such as SBATCH_PARTITION.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from penstock.cluster import machine_report
from penstock.cluster.heartbeat import Silence
from penstock.cluster.job import LOG, ClusterJob
from penstock.cluster.outcome import Next, StartsSoFar, Verdict
from penstock.cluster.task_checks import NEEDED, check_machines
from penstock.core.errors import ClusterError
from penstock.core.wording.counted import counted

STATE, MACHINES, BATCH_BEAT = "state.json", "machines.jsonl", "batch.beat"
EXIT_FAILED = 2
POLL_S = 1.0
# Slurm's commands wait this long for the controller at most.
COMMAND_S = 60.0
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "NODE_FAIL")
_SURE = 3
# Reasons of a wait that has no end: the partition is smaller than the job, or its limits are.
_NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints")
_FIELD = re.compile(r"(\w+)=(\S*)")


@final
class SlurmJob:
    """A submitted job.

    Args:
        file: The record of the job.
        restarts: The number of restarts in a row that may bring nothing new.
        run: The folder or URL of the run.

    Raises:
        ClusterError: There is no Slurm, its controller does not answer, or the cluster cannot run the job.
    """

    def __init__(self, file: Path, restarts: int, run: Path | str) -> None:
        self._file, self._job, self._restarts, self._lost = file, ClusterJob.read(file), restarts, 0
        script = file.with_name("job.sh")
        python = shlex.quote(sys.executable)
        arguments = shlex.join([str(file), str(restarts), str(run)])
        asked = {"job": str(file), "paths": [*self._job.paths], "needed": [*NEEDED]}
        # Its text: a machine may not see the folder of the job.
        report = [sys.executable, "-c", Path(machine_report.__file__).read_text(), json.dumps(asked)]
        # Other ends of that step, such as that of a machine which is gone, are those of the ranks.
        script.write_text(
            f"#!/bin/sh\n"
            f"srun --kill-on-bad-exit=0 {shlex.join(report)} > {shlex.quote(str(file.with_name(MACHINES)))}\n"
            f"[ $? != {machine_report.EXIT_UNFIT} ] || exit {EXIT_FAILED}\n"
            f"exec {python} -m penstock.cluster.slurm_batch {arguments}\n"
        )
        command = [
            "sbatch",
            "--parsable",
            "--requeue",
            "--open-mode=append",
            f"--job-name=penstock-{self._job.command}",
            f"--output={file.with_name(LOG)}",
            f"--chdir={self._job.working_folder}",
            f"--ntasks={self._job.size}",
            f"--cpus-per-task={self._job.cores}",
            *(["--gpus-per-task=1"] if self._job.device == "cuda" else []),
            str(script),
        ]
        self.number = _said(command, "cannot take the job").partition(";")[0]

    def wait(self, say: Callable[[str], None], look: Callable[[], object] = lambda: None) -> Sequence[str]:
        """Follow the job until it has ended; return the last lines that rank 0 printed.

        Args:
            say: Shows a line to the user.
            look: Called now and then.

        Raises:
            ClusterError: It failed.
            KeyboardInterrupt: The user stopped it; the job was cancelled.
        """
        try:
            fields = self._follow(say, look)
        except KeyboardInterrupt:
            self.cancel()
            raise
        found, _ = read_state(self._file)
        if found is not None and found.next is Next.DONE and fields.get("JobState") in (None, "COMPLETED"):
            return found.output
        if found is not None and found.next is Next.FAILED:
            raise ClusterError(found.sentence)
        check_machines(_machines(self._file.with_name(MACHINES)))
        raise self._failure(fields)

    def _follow(self, say: Callable[[str], None], look: Callable[[], object]) -> Mapping[str, str]:
        """Follow the job; return Slurm's last record of it."""
        log, shown, waits, ended = self._file.with_name(LOG), 0, "", 0
        silence = Silence(self._file.with_name(BATCH_BEAT), POLL_S)
        while True:
            fields = self._fields()
            shown = _show(log, shown, say)
            look()
            state = fields.get("JobState", "")
            ended = ended + 1 if state in _ENDED else 0
            # A job that Slurm itself puts back into the queue looks ended for a moment.
            if ended == _SURE or not fields:
                _show(log, shown, say)
                return fields
            if state != "RUNNING":
                silence.begin()
            elif silence.is_lost():
                self._put_back(fields, say)
                silence.begin()
            why = fields.get("Reason", "None")
            if state == "PENDING" and why in _NEVER:
                self.cancel()
                raise ClusterError(
                    f"Slurm's partition {fields.get('Partition')} is too small for "
                    f"{counted(self._job.size, 'process', 'processes')} of "
                    f"{counted(self._job.cores, 'core')} each ({why}); ask for fewer, or name another SBATCH_PARTITION."
                )
            if state == "PENDING" and why not in ("None", waits):
                say(f"Slurm's job {self.number} waits ({why}).")
                waits = why
            time.sleep(POLL_S)

    def _failure(self, fields: Mapping[str, str]) -> ClusterError:
        """Return why a job ended that has not said so itself."""
        log = self._file.with_name(LOG)
        if not log.exists() and (host := fields.get("BatchHost")):
            return ClusterError(
                f"Slurm's job {self.number} ended as {fields['JobState']} before it printed anything: {host} does not "
                f"see {log.parent}, or cannot write there; give an --out in a folder that all machines share "
                f"(for a URL, set PENSTOCK_CACHE to one)."
            )
        return ClusterError(
            f"Slurm's job {self.number} ended as {fields.get('JobState', 'unknown')}, after what it printed above; "
            f"give the same command to go on."
        )

    def _put_back(self, fields: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Put the job back into the queue, as Slurm does once it finds out that the first machine lost it.

        Raises:
            ClusterError: It was put back too often.
        """
        self._lost += 1
        why = f"Slurm's job {self.number} is gone from its first machine, {fields.get('BatchHost')}"
        if self._lost > self._restarts:
            self.cancel()
            raise ClusterError(f"{why}, and was cancelled; give the same command to go on.")
        say(f"{why}; it goes back into the queue.")
        _run(["scontrol", "requeue", self.number])

    def cancel(self) -> None:
        """End the job."""
        _run(["scancel", self.number])

    def _fields(self) -> Mapping[str, str]:
        """Return Slurm's record of the job; empty once Slurm has forgotten it."""
        said = _run(["scontrol", "show", "job", "--oneliner", self.number])
        if said.returncode == 0:
            return dict(_FIELD.findall(said.stdout))
        if "Invalid job id" in said.stderr:
            return {}
        # The controller is away for a while, as it may be.
        return {"JobState": "UNKNOWN"}


def _machines(file: Path) -> list[dict[str, Any]]:
    """Read the reports that tasks have printed, between other lines that their Python may print."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    # A line of a task that was killed may be cut off.
    return [json.loads(line) for line in lines if line.startswith('{"host": ') and line.endswith("}")]


def read_state(file: Path) -> tuple[Verdict | None, StartsSoFar]:
    """Return what followed from the last start of a job, and the progress; None before the end of the first one."""
    try:
        fields: dict[str, Any] = json.loads(file.with_name(STATE).read_bytes())
    except OSError:
        return None, StartsSoFar()
    found = Verdict(**fields["verdict"] | {"next": Next(fields["verdict"]["next"])})
    return found, StartsSoFar(**fields["progress"])


def write_state(file: Path, found: Verdict, progress: StartsSoFar) -> None:
    """Write what follows from a start."""
    beside = file.with_name(f".{STATE}")
    beside.write_text(json.dumps({"verdict": asdict(found), "progress": asdict(progress)}) + "\n")
    beside.rename(file.with_name(STATE))


def outcomes_folder(file: Path, start: int) -> Path:
    """Return the folder into which the ranks of a start write how they ended."""
    return file.with_name(f"start-{start}")


def beat_file(ends: Path, rank: int) -> Path:
    """Return the file of a rank's heartbeats in the `outcomes_folder` of a start."""
    return ends / f"rank-{rank}.beat"


def check_slurm() -> None:
    """Check that Slurm's commands are here and its controller answers.

    Raises:
        ClusterError: They are not, or it does not.
    """
    if missing := [name for name in ("sbatch", "scontrol", "scancel") if shutil.which(name) is None]:
        raise ClusterError(
            f"--on slurm needs Slurm's commands, and {', '.join(missing)} is not on the PATH; give the command on a "
            f"machine that submits jobs."
        )
    # Its exit status is 0 where the controller is down.
    said = _run(["scontrol", "ping"])
    if said.returncode or " UP" not in said.stdout:
        words = " ".join((said.stdout + said.stderr).split())[:200]
        raise ClusterError(f"Slurm's controller does not answer ({words}); start it, or correct slurm.conf.")


def _said(command: Sequence[str], what: str) -> str:
    said = _run(command)
    if said.returncode:
        words = " ".join(said.stderr.replace(f"{command[0]}: error: ", "").split())[:300].rstrip(".")
        raise ClusterError(f"Slurm {what}: {words}; ask for fewer processes or cores, or another SBATCH_PARTITION.")
    return said.stdout.strip()


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {COMMAND_S:g} s")


def _show(log: Path, shown: int, say: Callable[[str], None]) -> int:
    """Show the whole lines that a log got; return the bytes that were shown."""
    try:
        with log.open("rb") as source:
            source.seek(shown)
            new = source.read()
    except FileNotFoundError:
        return shown
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        say(line)
    return shown + len(whole)
