"""The faults of a run, chosen by a seed."""

import random
from dataclasses import dataclass

KILL_FRONTEND, KILL_ENGINE = "kill front-end", "kill engine"
STOP_FRONTEND, STOP_ENGINE = "stop front-end", "stop engine"
HANG_FRONTEND, HANG_ENGINE = "hang front-end", "hang engine"
DISK_FULL, OVERSIZED, HOSTILE = "disk full", "oversized message", "hostile load"
EDIT, SWAP, LOAD, UNLOAD = "edit of app.py", "swap of the bundle", "load", "unload and load"

# How often each is chosen, relative to the others.
WEIGHTS = {
    KILL_FRONTEND: 4,
    KILL_ENGINE: 3,
    STOP_FRONTEND: 2,
    STOP_ENGINE: 2,
    HANG_FRONTEND: 1,
    HANG_ENGINE: 1,
    DISK_FULL: 1,
    OVERSIZED: 2,
    HOSTILE: 2,
    EDIT: 3,
    SWAP: 3,
    LOAD: 4,
    UNLOAD: 2,
}
KINDS = tuple(WEIGHTS)
HITLESS = (KILL_FRONTEND, LOAD, UNLOAD)
LONGEST_STOP_S = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One fault to come.

    Args:
        number: Its number, from 0.
        kind: One of `KINDS`.
        choice: A number in [0, 1) that chooses what it is done to.
        stop_s: How long a stop lasts.
        pause_s: Pause before it, after the server is back from the one before.
    """

    number: int
    kind: str
    choice: float
    stop_s: float
    pause_s: float


def schedule(seed: int, events: int, kinds: tuple[str, ...] = KINDS) -> list[Planned]:
    """Return the faults of a seed; a longer schedule begins with the shorter one.

    Args:
        seed: The seed.
        events: How many.
        kinds: The kinds to choose from.
    """
    chance = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        Planned(
            number=number,
            kind=chance.choices(kinds, weights)[0],
            choice=chance.random(),
            stop_s=chance.uniform(0.05, LONGEST_STOP_S),
            pause_s=chance.uniform(0.0, 0.3),
        )
        for number in range(events)
    ]
