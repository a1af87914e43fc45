"""Pauses before a process that died is started again."""

from typing import final

# A process that dies within this time of its start, or before its first heartbeat, is restarted with backoff.
EARLY_DEATH_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.4, 10.0
# A front-end that served before its early death is replaced at once, as long as so many in a row have died early.
REPLACED_AT_ONCE = 8


@final
class Backoff:
    """Exponential backoff of one kind of early deaths.

    Args:
        at_once: Number of deaths in a row after which the next process starts at once.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self._deaths, self._pause_s = 0, 0.0

    def pause_s(self) -> float:
        """Count one more death and return the pause after it, in seconds."""
        self._deaths += 1
        if self._deaths > self._at_once:
            self._pause_s = min(max(2 * self._pause_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)
        return self._pause_s


@final
class RestartPauses:
    """Pauses before the restarts of one child, with a count for each kind of early death, so that both loops slow down.

    Args:
        at_once: Number of early deaths in a row, of processes that served, after which the next one starts at once. A
            process that is killed shortly after its start is no crash loop; one that each time dies of its first
            requests is.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._served, self._unserved = Backoff(at_once), Backoff(1)

    def pause_s(self, lifetime_s: float, *, ready: bool, served: bool = False) -> float:
        """Count one more death and return the pause before the restart, in seconds.

        Args:
            lifetime_s: Lifetime of the process.
            ready: Whether it ever sent a heartbeat.
            served: Whether its start was over.
        """
        if ready and lifetime_s >= EARLY_DEATH_S:
            self._served.reset()
            self._unserved.reset()
            return 0.0
        return (self._served if served else self._unserved).pause_s()
