"""Ends of the processes of one start, and what follows from them: done, failed, or to be started again. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self, final

from penstock.train.parallel.rank_process import EXIT_INTERRUPTED, EXIT_PEERS_LOST


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """The end of one training process.

    Args:
        rank: Its rank.
        host: The machine's name.
        status: Exit status, negative for a signal.
        sentence: What went wrong; empty if nothing did.
        output: The last lines that it printed.
    """

    rank: int
    host: str
    status: int
    sentence: str = ""
    output: Sequence[str] = ()

    def text(self) -> str:
        """Return the record as JSON in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `text` gives."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    @property
    def is_own_failure(self) -> bool:
        """True if the process failed by itself, as it will fail again."""
        return self.status > 0 and self.status not in (EXIT_PEERS_LOST, EXIT_INTERRUPTED)


class Next(StrEnum):
    """Consequence of a start."""

    DONE = "done"
    FAILED = "failed"
    AGAIN = "again"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Consequence of a start, and the reason.

    Args:
        next: The consequence.
        sentence: The reason; empty if the run is done.
        output: The last lines that rank 0 printed.
    """

    next: Next
    sentence: str = ""
    output: Sequence[str] = ()


def verdict(outcomes: Sequence[RankOutcome], size: int) -> Verdict:
    """Decide what follows from the ends of processes.

    A process that failed by itself would fail again: its sentence is that of the run. One that was killed, is gone with
    its machine, or only lost the others, is not at fault.

    Args:
        outcomes: The ends that are known, of different ranks.
        size: The number of processes.
    """
    by_rank = sorted(outcomes, key=lambda outcome: outcome.rank)
    failed = [outcome for outcome in by_rank if outcome.status]
    if own := [outcome for outcome in failed if outcome.is_own_failure]:
        return Verdict(next=Next.FAILED, sentence=own[0].sentence)
    killed = [outcome for outcome in failed if outcome.status < 0]
    missing = size - len(by_rank)
    if not failed and not missing:
        return Verdict(next=Next.DONE, output=by_rank[0].output)
    if killed:
        sentence = killed[0].sentence
    elif missing:
        sentence = f"{missing} of {size} processes are gone with their machine, or were ended by the engine."
    else:
        sentence = failed[0].sentence
    return Verdict(next=Next.AGAIN, sentence=sentence)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StartsSoFar:
    """Starts of a command so far, and how far they came.

    Args:
        start: The number of starts so far.
        fruitless: The number of starts, up to the last one, without a new checkpoint between them.
        step: The step of the newest checkpoint, -1 for none; of scoring, the number of parts that are there.
    """

    start: int = 0
    fruitless: int = 0
    step: int = -1

    def after(self, step: int) -> "StartsSoFar":
        """Return the progress after one more start.

        Args:
            step: The same now.
        """
        fruitless = self.fruitless + 1 if step <= self.step else 0
        return StartsSoFar(start=self.start + 1, fruitless=fruitless, step=max(step, self.step))


def limited(found: Verdict, progress: StartsSoFar, restarts: int, gain: str = "checkpoint") -> Verdict:
    """End a run that does not get on.

    Args:
        found: What follows from the last start.
        progress: The progress with that start.
        restarts: The number of restarts in a row that may bring nothing new.
        gain: What a start that gets on brings.
    """
    if found.next is not Next.AGAIN or progress.fruitless <= restarts:
        return found
    times = "" if restarts == 0 else f" It was started {progress.fruitless} times without a new {gain}."
    return Verdict(next=Next.FAILED, sentence=f"{found.sentence}{times}")
