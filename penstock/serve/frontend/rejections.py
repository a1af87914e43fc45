"""The last rejection by admission control: it holds for equal requests, and shows whether an overload goes on."""

from dataclasses import dataclass, field
from typing import final

from penstock.core.errors import Overloaded

# A rejection is reused for this long for equal requests, unless a result comes before.
REJECTION_NS = 1_000_000
# An overload lasts from this share of the budget on.
LASTING_SHARE = 0.25


@final
@dataclass(slots=True, eq=False)
class Rejections:
    """Rejections of the requests to one table with the default budget and priority.

    Args:
        budget_ns: Latency budget of a request that names none.

    Attributes:
        standing: Whether a request was rejected since the last result, so that the rejection may be reused.
    """

    budget_ns: int
    standing: bool = field(default=False, init=False)
    _last: Overloaded | None = field(default=None, init=False)
    _until_ns: int = field(default=0, init=False)
    _least_finish_ns: int = field(default=0, init=False)
    # When the present row of rejections began, and the newest of them.
    _first_ns: int = field(default=0, init=False)
    _last_ns: int = field(default=0, init=False)

    def remember(self, rejection: Overloaded, least_finish_ns: int, now_ns: int) -> None:
        """Note a rejection.

        Args:
            rejection: The rejection.
            least_finish_ns: Predicted time to the earliest finish of a new request.
            now_ns: The current time.
        """
        if now_ns - self._last_ns > self.budget_ns:
            self._first_ns = now_ns
        self._last_ns = now_ns
        self._last, self.standing, self._until_ns = rejection, True, now_ns + REJECTION_NS
        # Until a result comes, no fewer rows wait, so no request with less time left can be admitted.
        self._least_finish_ns = least_finish_ns

    def cached(self, now_ns: int, left_ns: int) -> Overloaded | None:
        """Return the last rejection if it holds for a request with this much time left; None otherwise."""
        holds = self.standing and now_ns < self._until_ns and left_ns < self._least_finish_ns
        return self._last if holds else None

    def sustained(self, now_ns: int) -> bool:
        """Return whether requests have been rejected for a while, without a break of a budget."""
        lasted_ns = self._last_ns - self._first_ns
        return now_ns - self._last_ns <= self.budget_ns and lasted_ns > self.budget_ns * LASTING_SHARE
