"""Explicit-state exploration: every interleaving, breadth first, as TLC does it for TLA+."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any


class Violation(AssertionError):
    """An invariant does not hold.

    Args:
        invariant: Its name.
        detail: The values.
    """

    def __init__(self, invariant: str, detail: object = "") -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {detail}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """Everything that can happen.

    Args:
        states: Number of distinct states.
        ends: Number of states in which nothing more can happen.
        labels: Names of the transitions that were taken.
    """

    states: int
    ends: int
    labels: frozenset[str]


def explore(
    first: Any,
    key: Callable[[Any], Hashable],
    successors: Callable[[Any], Iterable[tuple[str, Any]]],
    check_end: Callable[[Any], object],
) -> Explored:
    """Visit every reachable state once.

    Args:
        first: The initial state.
        key: Returns what makes a state itself.
        successors: Yields the label and the state of every transition; raises `Violation`.
        check_end: Called with states that have no successor; raises `Violation` where that is a deadlock.

    Raises:
        Violation: With the shortest path to it as a note.
    """
    # The path to a state, as the transition and the path before it.
    paths: dict[Hashable, tuple[str, Hashable | None]] = {key(first): ("", None)}
    waiting, ends, labels = deque([first]), 0, set[str]()
    while waiting:
        state = waiting.popleft()
        here, count = key(state), 0
        try:
            for label, after in successors(state):
                count += 1
                labels.add(label.split()[0])
                there = key(after)
                if there not in paths:
                    paths[there] = (label, here)
                    waiting.append(after)
            if not count:
                ends += 1
                check_end(state)
        except Violation as violation:
            steps: list[str] = []
            at: Hashable | None = here
            while at is not None:
                label, at = paths[at]
                steps.append(label)
            violation.add_note("after " + ", ".join(reversed(steps[:-1])))
            raise
    return Explored(states=len(paths), ends=ends, labels=frozenset(labels))
