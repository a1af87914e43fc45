"""The batch job of `penstock train --on slurm`, on the first of its machines: `python -m ... JOB RESTARTS RUN`.

It runs srun once, writes what follows from that, and puts the job back into the queue where a process was lost. Slurm
itself does so where a machine failed or the job was preempted.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from penstock.train.checkpoint.remote_checkpoints import newest_step
from penstock.train.cluster.engine import again_sentence
from penstock.train.cluster.job import ClusterJob
from penstock.train.cluster.outcome import Next, RankOutcome, limited, verdict
from penstock.train.cluster.slurm_engine import read_state, write_state
from penstock.train.parallel.launch import free_port

EXIT_FAILED = 2
COMMAND_S = 60.0
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
    subprocess.run(command, check=False, env={**os.environ, **rank_zero_place(os.environ)})
    outcomes = [RankOutcome.parse(each.read_text()) for each in sorted(ends.glob("*.json"))]
    progress = before.after(newest_step(run))
    found = limited(verdict(outcomes, job.size), progress, restarts)
    write_state(file, found, progress)
    if found.next is Next.AGAIN and not stopped:
        sys.stderr.write(f"{again_sentence(found.sentence, progress)}\n")
        sys.stderr.flush()
        return subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False).returncode
    return 0 if found.next is Next.DONE else EXIT_FAILED


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
