"""The engine of a cluster, and the run of a command on it: started again until it is done or does not get on."""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from penstock.cluster.outcome import Next, RankOutcome, StartsSoFar, limited, verdict
from penstock.core.errors import ClusterError

# Processes of the last start end in this time, and let go of GPUs and ports.
PAUSE_S = 5.0
CONNECT_S = 5.0


class ClusterEngine(ABC):
    """Starts the processes of a job, all at once or none."""

    @abstractmethod
    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """Start all processes of a job and wait until they have ended.

        Args:
            file: The record of the job.
            start: The number of this start.

        Returns:
            The ends that are known; a process that is gone with its machine has none.

        Raises:
            ClusterError: The cluster is not there, or cannot run the job.
        """

    def close(self) -> None:  # noqa: B027 - not every engine holds something
        """Let go of the cluster."""


def run_on(
    engine: ClusterEngine,
    file: Path,
    size: int,
    restarts: int,
    newest_step: Callable[[], int],
    say: Callable[[str], None],
) -> Sequence[str]:
    """Run a job to its end, and start it again where a process was lost.

    Args:
        engine: The engine.
        file: The record of the job.
        size: The number of its processes.
        restarts: The number of restarts in a row that may bring no new checkpoint.
        newest_step: Returns the step of the newest checkpoint; -1 for none.
        say: Shows a line to the user.

    Returns:
        The last lines that rank 0 printed.

    Raises:
        ClusterError: The run failed, and would fail again.
    """
    progress = StartsSoFar(step=newest_step())
    while True:
        outcomes = engine.run(file, progress.start + 1)
        progress = progress.after(newest_step())
        found = limited(verdict(outcomes, size), progress, restarts)
        if found.next is Next.DONE:
            return found.output
        if found.next is Next.FAILED:
            raise ClusterError(found.sentence)
        say(again_sentence(found.sentence, progress))
        time.sleep(PAUSE_S)


def again_sentence(why: str, progress: StartsSoFar) -> str:
    """Return the line that is shown before another start.

    Args:
        why: The reason.
        progress: The progress so far.
    """
    where = "from the beginning" if progress.step < 0 else f"from the checkpoint of step {progress.step:,}"
    return f"{why} Start {progress.start + 1} goes on {where}."


def why_unreachable(places: Sequence[str], port: int) -> str:
    """Return why no connection to the head of a cluster is possible; empty if one is.

    Args:
        places: Its addresses, HOST or HOST:PORT; one that answers is enough.
        port: The port of those that name none.
    """
    why = "no address"
    for place in places:
        try:
            parts = urlsplit(f"//{place}")
            with socket.create_connection((parts.hostname or "", parts.port or port), CONNECT_S):
                return ""
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
    return why
