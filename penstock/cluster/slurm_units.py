"""Scoring on Slurm: srun tasks that share the units by a fixed partition.

`python -m penstock.cluster.slurm_units JOB START` is one of them.
"""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from penstock.cluster.cluster_engine import PAUSE_S
from penstock.cluster.heartbeat import beating
from penstock.cluster.job import UNITS
from penstock.cluster.outcome import RankOutcome
from penstock.cluster.slurm_engine import SlurmJob, beat_file, check_slurm, outcomes_folder
from penstock.cluster.slurm_rank import ALONE, write_outcome
from penstock.cluster.units_engine import UnitsEngine
from penstock.cluster.units_task import OTHER_COMMAND, parts_there, score_units
from penstock.core.errors import PenstockError, StorageError
from penstock.train.parallel.rank_assignment import RankAssignment, rank_assignment
from penstock.train.parallel.rank_process import EXIT_PEERS_LOST

EXIT_USER_ERROR = 2
# Polls of Slurm between two looks into the output folder, which may be a bucket.
LOOK_EVERY = round(PAUSE_S)


@final
class SlurmUnits(UnitsEngine):
    """A batch job of Slurm.

    Args:
        out: The output folder or its URL.
        restarts: The number of restarts in a row that may bring no new part.
        say: Shows a line to the user.

    Raises:
        ClusterError: There is no Slurm here, or its controller does not answer.
    """

    def __init__(self, out: str, restarts: int, say: Callable[[str], None]) -> None:
        check_slurm()
        self._out, self._restarts, self._say = out, restarts, say

    def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
        """See `UnitsEngine`."""
        job = SlurmJob(file, self._restarts, self._out)
        self._say(f"Slurm's job {job.number} scores.")
        before, shown, looks = parts_there(self._out), 0, 0

        def look() -> None:
            nonlocal shown, looks
            looks += 1
            # A bucket that does not answer now says nothing of the job.
            with suppress(StorageError):
                if looks % LOOK_EVERY == 0:
                    now = min(len(units), parts_there(self._out) - before)
                    done(now - shown)
                    shown = now

        job.wait(self._say, look)


def main(arguments: list[str]) -> int:
    """Score this task's share of the units; return 0 if it ended well."""
    file, start = Path(arguments[0]), int(arguments[1])
    if not file.exists():
        sys.stderr.write(f"penstock: {OTHER_COMMAND}\n")
        return EXIT_USER_ERROR
    assignment = rank_assignment(os.environ) or ALONE
    with beating(beat_file(outcomes_folder(file, start), assignment.rank)):
        status, sentence = _score(file, assignment)
    outcome = RankOutcome(rank=assignment.rank, host=socket.gethostname(), status=status, sentence=sentence)
    if file.exists():
        write_outcome(file, start, outcome)
    return status


def _score(file: Path, assignment: RankAssignment) -> tuple[int, str]:
    """Score the units of a task; return its exit status, and what went wrong."""
    from penstock.score.shared_run import SharedRun

    todo = SharedRun.read(file.with_name(UNITS)).todo
    try:
        for unit in todo[assignment.rank :: assignment.size]:
            if sentence := score_units(file, [unit])["error"]:
                return EXIT_USER_ERROR, sentence
    except PenstockError as error:
        # It may pass: the job is started again.
        return EXIT_PEERS_LOST, str(error)
    return 0, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
