"""The srun task of one rank: `python -m penstock.train.cluster.slurm_rank JOB START`."""

import os
import sys
from pathlib import Path

from penstock.train.cluster.rank_task import run_rank
from penstock.train.cluster.slurm_batch import outcomes_folder
from penstock.train.parallel.rank_assignment import RankAssignment, rank_assignment

ALONE = RankAssignment(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=29_500)


def main(arguments: list[str]) -> int:
    """Run the rank; return 0 if it ended well, else 1, which ends the other tasks of the step."""
    file, start = Path(arguments[0]), int(arguments[1])
    assignment = rank_assignment(os.environ) or ALONE
    outcome = run_rank(file, start, assignment)
    place = outcomes_folder(file, start) / f"rank-{assignment.rank}.json"
    beside = place.with_name(f".{place.name}")
    beside.write_text(outcome.text())
    beside.rename(place)
    return 1 if outcome.status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
