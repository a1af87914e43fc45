"""The srun task of one rank: `python -m penstock.cluster.slurm_rank JOB START`."""

import os
import sys
from pathlib import Path

from penstock.cluster.outcome import RankOutcome
from penstock.cluster.rank_task import run_rank
from penstock.cluster.slurm_engine import outcomes_folder
from penstock.train.parallel.rank_assignment import RankAssignment, rank_assignment

ALONE = RankAssignment(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=29_500)


def main(arguments: list[str]) -> int:
    """Run the rank; return 0 if it ended well, else 1, which ends the other tasks of the step."""
    file, start = Path(arguments[0]), int(arguments[1])
    assignment = rank_assignment(os.environ) or ALONE
    outcome = run_rank(file, start, assignment)
    write_outcome(file, start, outcome)
    return 1 if outcome.status else 0


def write_outcome(file: Path, start: int, outcome: RankOutcome) -> None:
    """Write the end of a task where the batch job looks for it.

    Args:
        file: The record of the job.
        start: The number of this start.
        outcome: The end.
    """
    place = outcomes_folder(file, start) / f"rank-{outcome.rank}.json"
    beside = place.with_name(f".{place.name}")
    beside.write_text(outcome.text())
    beside.rename(place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
