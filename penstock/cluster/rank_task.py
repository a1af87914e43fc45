"""The task of one rank, in the engine's process on a machine of the cluster: it starts and watches `penstock train`.

No torch here: the engine's process lives as long as the rank, beside it.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.cluster.job import ClusterJob, unpack_sources
from penstock.cluster.outcome import RankOutcome
from penstock.core.errors import PenstockError
from penstock.train.interrupt import Interrupt
from penstock.train.parallel.launch import SETTLE_S
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.rank_process import RankProcess
from penstock.train.run_owner import Launch

# Variables of a rank that `penstock train` reads, beside those of its launcher.
LAUNCH_VARIABLE, COPY_VARIABLE = "PENSTOCK_LAUNCH", "PENSTOCK_APP_COPY"
EXIT_USER_ERROR = 2
POLL_S = 0.05


def run_rank(
    file: Path, start: int, assignment: RankAssignment, environment: Mapping[str, str] | None = None
) -> RankOutcome:
    """Run one rank of a job until it ends. SIGINT and SIGTERM are passed on to it.

    A rank that lost the others ends a moment later than they: the first to end should be the one at fault.

    Args:
        file: The record of the job.
        start: The number of this start.
        assignment: The rank.
        environment: Variables for the process; by default those of this one.
    """
    host = socket.gethostname()
    try:
        job = ClusterJob.read(file)
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            copy = unpack_sources(job, file, Path(folder))
            return _run(job, start, assignment, dict(os.environ if environment is None else environment), copy, host)
    except PenstockError as error:
        return RankOutcome(rank=assignment.rank, host=host, status=EXIT_USER_ERROR, sentence=str(error))


def _run(
    job: ClusterJob,
    start: int,
    assignment: RankAssignment,
    environment: dict[str, str],
    copy: Path | None,
    host: str,
) -> RankOutcome:
    environment |= {**job.environment, LAUNCH_VARIABLE: str(Launch(token=job.token, start=start))}
    if copy is not None:
        environment[COPY_VARIABLE] = str(copy)
    command = [sys.executable, "-m", "penstock", *job.arguments]
    folder = Path(job.working_folder)
    process = RankProcess(
        command, assignment, environment, folder=folder if folder.is_dir() else None, keeps_output=True
    )

    def forward(number: int) -> None:
        if process.status is None:
            process.process.send_signal(number)

    try:
        with Interrupt(forward):
            while process.status is None:
                time.sleep(POLL_S)
    finally:
        process.end()
    status = process.status
    assert status is not None
    outcome = RankOutcome(
        rank=assignment.rank,
        host=host,
        status=status,
        sentence="" if status == 0 else process.own_sentence or f"{process.ending}, on {host}.",
        output=tuple(process.output),
    )
    if status > 0 and not outcome.is_own_failure:
        time.sleep(SETTLE_S)
    return outcome
