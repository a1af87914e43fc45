"""The order to try a bundle, from a server to the process of `penstock.runtime.trial`."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Self, final

NICE = 5
# Longest verdict in characters, and its bytes at most: an empty pipe takes them in one write.
MAX_VERDICT, MAX_VERDICT_BYTES = 4096, 64 << 10


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOrder:
    """A bundle to try, and how it is served.

    Args:
        bundle: The bundle's folder.
        app: The application, if it moved.
        accept_changed: Accept an application whose sources changed.
        network: Whether the engine makes the network itself, so that it is made here too.
        idle: Run only while the cores have nothing else to do, instead of at a low priority.
    """

    bundle: str
    app: str | None
    accept_changed: bool
    network: bool
    idle: bool = False

    def to_json(self) -> str:
        """Encode for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode what `to_json` wrote."""
        return cls(**json.loads(text))


def lower_priority(process: int, *, idle: bool) -> None:
    """Let others go before a process, or before this one where it is 0."""
    if idle:
        # Others take the core from it as soon as they wake, which a low priority does not promise.
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, process, max(NICE, os.getpriority(os.PRIO_PROCESS, process)))
