"""Start the training processes of one machine, watch them, and end all of them when one fails."""

import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from penstock.core.errors import TrainError
from penstock.train.interrupt import Interrupt
from penstock.train.parallel.rank_assignment import RankPlace, assign_ranks
from penstock.train.parallel.rank_process import EXIT_INTERRUPTED, EXIT_PEERS_LOST, RankProcess

POLL_S = 0.02
# Victims of a failure exit at about the same time as the culprit.
SETTLE_S = 3.0


def launch(command: Sequence[str], processes: int, environment: Mapping[str, str]) -> None:
    """Run a command in several training processes, until all have ended.

    Args:
        command: The same for each process; rank and address are in the environment, as torchrun sets them.
        processes: The number of processes.
        environment: The environment of all of them.

    Raises:
        TrainError: A process failed; the others were ended.
        KeyboardInterrupt: The user stopped the training.
    """
    workers: list[RankProcess] = []

    def forward(number: int) -> None:
        for worker in workers:
            if worker.status is None:
                worker.process.send_signal(number)

    with held_port() as port, Interrupt(forward):
        place = RankPlace(machine="", address="127.0.0.1", port=port)
        try:
            for assignment in assign_ranks([place] * processes):
                # One by one: if a start fails, the processes before it must be ended.
                workers.append(RankProcess(command, assignment, environment))  # noqa: PERF401
            ended = _first_to_fail(workers)
        except OSError as error:
            raise TrainError(
                f"process {len(workers)} of {processes} cannot be started ({error.strerror}); request fewer processes."
            ) from None
        finally:
            for worker in workers:
                worker.end()
    if ended is None:
        return
    if all(worker.status == EXIT_INTERRUPTED for worker in workers):
        raise KeyboardInterrupt
    raise TrainError(ended.own_sentence or f"{ended.ending}; the others were ended.")


def _first_to_fail(workers: Sequence[RankProcess]) -> RankProcess | None:
    """Wait until a process has failed or all have ended; return the one at fault, or None if all succeeded.

    After an interrupt rank 0 writes a checkpoint first, which may take long; a second signal ends the processes.
    """
    deadline_s: float | None = None
    while True:
        statuses = {worker.status for worker in workers}
        failures = statuses - {None, 0, EXIT_INTERRUPTED}
        if failures and deadline_s is None:
            deadline_s = time.monotonic() + SETTLE_S
        # A victim may exit before the culprit.
        overdue = deadline_s is not None and time.monotonic() >= deadline_s
        if None not in statuses or failures - {EXIT_PEERS_LOST} or overdue:
            return min((worker for worker in workers if worker.status), key=RankProcess.blame, default=None)
        time.sleep(POLL_S)


def free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port that is free now at an address of this machine."""
    with held_port(address) as port:
        return port


@contextmanager
def held_port(address: str = "127.0.0.1") -> Generator[int]:
    """Hold a free TCP port at an address of this machine: the kernel gives it to no other process meanwhile.

    Nothing listens there, so that a process that binds the port by its number, with `SO_REUSEADDR`, can. A store of
    torch does.

    Args:
        address: The address.
    """
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((address, 0))
        yield place.getsockname()[1]
