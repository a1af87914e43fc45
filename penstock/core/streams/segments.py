"""Segments of a live signal: the declaration of what feeds the later steps of a chain, such as each sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import ApplicationError, ComputeFailed

# `find(event, memory, last)` returns an input of the next step for each segment that ended, and the memory for the next
# call.
FindSegments = Callable[[Any, Any, bool], tuple[Sequence[Any], Any]]

MAX_UNDER_WAY = 64
MAX_BUDGET_MS = 600_000


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Segments of the signal of a chain whose first part is live: where one ends, it goes through the later steps.

    Args:
        find: Takes an event of the live application, None where it has none; the memory that its last call returned
            (None at first); and whether the stream ends with this event. It returns a list with an input of the next
            step for each segment that ended, and the memory. It is called on every event, so it must be fast.
        budget_ms: Latency budget of a segment from its end to its answer, in milliseconds; where the last part
            generates, to its first output. None for the server's budget.
        max_under_way: Segments of one stream that are under way at once; a further one is rejected.

    Raises:
        ApplicationError: A field is out of range.
    """

    find: FindSegments
    budget_ms: float | None = None
    max_under_way: int = 4

    def __post_init__(self) -> None:
        if not callable(self.find):
            raise ApplicationError(
                f"Segments has find={str(self.find)[:80]!r}; it must be a function of event, memory and last."
            )
        budget_ms = self.budget_ms
        if budget_ms is not None and not (type(budget_ms) in (int, float) and 0 < budget_ms <= MAX_BUDGET_MS):
            raise ApplicationError(
                f"Segments has budget_ms={budget_ms!r}; it must be a number of milliseconds above 0, to "
                f"{MAX_BUDGET_MS:,}, or None."
            )
        if type(self.max_under_way) is not int or not 1 <= self.max_under_way <= MAX_UNDER_WAY:
            raise ApplicationError(
                f"Segments has max_under_way={self.max_under_way!r}; it must be a whole number, 1 to {MAX_UNDER_WAY}."
            )


@final
class SegmentFinder:
    """The `find` of one stream, with its memory.

    Args:
        chain: Name of the chain.
        segments: Its declaration.
    """

    def __init__(self, chain: str, segments: Segments) -> None:
        self._chain, self._find = chain, segments.find
        self._memory: Any = None

    def __call__(self, event: Any, last: bool) -> Sequence[Any]:
        """Return the inputs of the segments that ended with an event.

        Raises:
            ComputeFailed: The function failed, or gave something else.
        """
        try:
            found, self._memory = self._find(event, self._memory, last)
        except (Exception, SystemExit) as error:
            raise ComputeFailed(
                f"The segments of chain {self._chain!r} failed on an event; the server's log says how."
            ) from error
        if not isinstance(found, list | tuple):
            raise ComputeFailed(
                f"The segments of chain {self._chain!r} give a {type(found).__name__}, not a list of inputs."
            )
        return found
