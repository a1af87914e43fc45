"""The batch job of `penstock train` and `score` with `--on slurm`, on the first of its machines.

`python -m penstock.cluster.slurm_batch JOB RESTARTS RUN`, where RUN is the folder of the run or of the scores.


It runs srun once, writes what follows from that, and puts the job back into the queue where a process was lost. Slurm
itself does so where a machine failed or the job was preempted.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from penstock.cluster.cluster_engine import again_sentence
from penstock.cluster.heartbeat import BEAT_S, Silence, beating
from penstock.cluster.job import ClusterJob
from penstock.cluster.outcome import Next, RankOutcome, StartsSoFar, limited, verdict
from penstock.cluster.slurm_engine import BATCH_BEAT, EXIT_FAILED, beat_file, outcomes_folder, read_state, write_state
from penstock.cluster.units_task import parts_there
from penstock.train.checkpoint.remote_checkpoints import newest_step
from penstock.train.parallel.launch import free_port

COMMAND_S = 60.0
# After the first task that failed, Slurm ends the others in this time: more than its usual KillWait of 30 s.
GONE_S = 40.0
POLL_S = 0.5
_ADDRESS = re.compile(r"NodeAddr=(\S+)")


def main(arguments: list[str]) -> int:
    """Run one start of the job; return the exit status of the batch script."""
    file, restarts, run = Path(arguments[0]), int(arguments[1]), arguments[2]
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
    kind = KINDS[job.command]
    command = ["srun", *kind.options, f"--cpus-per-task={job.cores}"]
    if job.device == "cuda":
        command += ["--gpus-per-task=1"]
    command += [sys.executable, "-m", kind.module, str(file), str(start)]
    environment = {**os.environ, **rank_zero_place(os.environ)}
    with beating(file.with_name(BATCH_BEAT)), subprocess.Popen(command, env=environment) as srun:
        _wait(srun, ends, kind, job.size)
    outcomes = _outcomes(ends)
    progress = before.after(kind.progress(run))
    found = limited(verdict(outcomes, job.size), progress, restarts, kind.gain)
    write_state(file, found, progress)
    if found.next is Next.AGAIN and not stopped:
        sys.stderr.write(f"{kind.again(found.sentence, progress)}\n")
        sys.stderr.flush()
        return subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False).returncode
    return 0 if found.next is Next.DONE else EXIT_FAILED


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchKind:
    """One of the commands that a batch job runs.

    Args:
        module: The module of a task.
        options: Options of srun.
        gone_s: The time from the first end of this kind to that of all tasks.
        ends_all: True for an end of a task after which the others are of no use.
        beats: True if tasks write heartbeats, because the others do not notice that one is lost.
        progress: How far a run has come, given its folder.
        gain: What a start that gets on brings.
        again: The line that is shown before another start.
    """

    module: str
    options: Sequence[str]
    gone_s: float
    ends_all: Callable[[RankOutcome], bool]
    beats: bool
    progress: Callable[[str], int]
    gain: str
    again: Callable[[str, StartsSoFar], str]


KINDS: Mapping[str, BatchKind] = {
    "train": BatchKind(
        module="penstock.cluster.slurm_rank",
        options=("--kill-on-bad-exit=1",),
        gone_s=GONE_S,
        ends_all=lambda outcome: outcome.status != 0,
        beats=False,
        progress=lambda run: newest_step(Path(run)),
        gain="checkpoint",
        again=again_sentence,
    ),
    # The others go on without a task that was killed; one that failed by itself ends them.
    "score": BatchKind(
        module="penstock.cluster.slurm_units",
        options=("--kill-on-bad-exit=0", "--wait=0"),
        gone_s=0.0,
        ends_all=lambda outcome: outcome.is_own_failure,
        beats=True,
        progress=parts_there,
        gain="part",
        again=lambda why, progress: f"{why} Start {progress.start + 1} goes on after {progress.step:,} parts.",
    ),
}


def _wait(srun: "subprocess.Popen[bytes]", ends: Path, kind: BatchKind, size: int) -> None:
    """Wait for the end of srun, which itself waits for the tasks of a machine that is gone."""
    deadline_s: float | None = None
    silences = {rank: Silence(beat_file(ends, rank), BEAT_S) for rank in range(size if kind.beats else 0)}
    look_s = time.monotonic()
    while srun.poll() is None:
        outcomes = _outcomes(ends)
        if deadline_s is None and any(map(kind.ends_all, outcomes)):
            deadline_s = time.monotonic() + kind.gone_s
        if deadline_s is not None and time.monotonic() > deadline_s:
            srun.kill()
        if silences and time.monotonic() >= look_s:
            look_s = time.monotonic() + BEAT_S
            ended = {outcome.rank for outcome in outcomes}
            lost = {rank for rank, silence in silences.items() if silence.is_lost()}
            # The other tasks go on without a lost one. Stop srun once every task has ended or is lost.
            if lost - ended and len(lost | ended) == size:
                srun.kill()
        time.sleep(POLL_S)


def _outcomes(ends: Path) -> list[RankOutcome]:
    return [RankOutcome.parse(each.read_text()) for each in sorted(ends.glob("*.json"))]


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
