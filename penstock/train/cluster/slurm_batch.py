"""The batch job of `penstock train --on slurm`, on the first of its machines: `python -m ... JOB RESTARTS RUN`.

It runs srun once, writes what follows from that, and puts the job back into the queue where a process was lost. Slurm
itself does so where a machine failed or the job was preempted.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from penstock.train.checkpoint.remote_checkpoints import newest_step
from penstock.train.cluster.cluster_engine import again_sentence
from penstock.train.cluster.job import ClusterJob
from penstock.train.cluster.outcome import Next, RankOutcome, limited, verdict
from penstock.train.cluster.slurm_engine import EXIT_FAILED, read_state, write_state
from penstock.train.parallel.launch import free_port

COMMAND_S = 60.0
# After the first task that failed, Slurm ends the others in this time: more than its usual KillWait of 30 s.
GONE_S = 40.0
POLL_S = 0.5
_ADDRESS = re.compile(r"NodeAddr=(\S+)")


def main(arguments: list[str]) -> int:
    """Run one start of the job; return the exit status of the batch script."""
    file, restarts, run = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    job, (_, before) = ClusterJob.read(file), read_state(file)
    # Slurm counts the starts that it makes itself too.
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    ends = outcomes_folder(file, start)
    ends.mkdir(exist_ok=True)
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # Slurm's own end of the job: srun passes it on to the ranks, which write a checkpoint.
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    command = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={job.cores}"]
    if job.device == "cuda":
        command += ["--gpus-per-task=1"]
    command += [sys.executable, "-m", "penstock.train.cluster.slurm_rank", str(file), str(start)]
    with subprocess.Popen(command, env={**os.environ, **rank_zero_place(os.environ)}) as srun:
        _wait(srun, ends)
    outcomes = _outcomes(ends)
    progress = before.after(newest_step(run))
    found = limited(verdict(outcomes, job.size), progress, restarts)
    write_state(file, found, progress)
    if found.next is Next.AGAIN and not stopped:
        sys.stderr.write(f"{again_sentence(found.sentence, progress)}\n")
        sys.stderr.flush()
        return subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False).returncode
    return 0 if found.next is Next.DONE else EXIT_FAILED


def _wait(srun: "subprocess.Popen[bytes]", ends: Path) -> None:
    """Wait for the end of srun, which waits for ever for the tasks of a machine that is gone."""
    deadline_s: float | None = None
    while srun.poll() is None:
        if deadline_s is None and any(outcome.status for outcome in _outcomes(ends)):
            deadline_s = time.monotonic() + GONE_S
        if deadline_s is not None and time.monotonic() > deadline_s:
            srun.kill()
        time.sleep(POLL_S)


def _outcomes(ends: Path) -> list[RankOutcome]:
    return [RankOutcome.parse(each.read_text()) for each in sorted(ends.glob("*.json"))]


def outcomes_folder(file: Path, start: int) -> Path:
    """Return the folder into which the ranks of a start write how they ended."""
    return file.with_name(f"start-{start}")


def rank_zero_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say where rank 0 listens: on this machine, the first of the job.

    The port is a free one: a process of an earlier start may still have that of the job's number.
    """
    node = environment.get("SLURMD_NODENAME", "")
    said = subprocess.run(
        ["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True, check=False, timeout=COMMAND_S
    )
    found = _ADDRESS.search(said.stdout)
    place = {"MASTER_PORT": str(free_port(""))}
    return place | ({"MASTER_ADDR": found[1]} if found else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
