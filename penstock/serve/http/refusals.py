"""Refusals of one front-end, bounded to a share of the event loop's time.

Under overload each refusal takes time that answers need. Beyond its share a refusal is held: the client waits for it,
and a client that tries again at once is slowed down. What is held is answered oldest first: when the share allows it,
when the loop is idle, and in any case `HELD_BUDGETS` after it was read. New requests do not wait behind it: one that
is read while there is room is admitted at once, so that the newest come first.

The share is what a large overload needs, by the measured costs: where an answer costs a hundred times as much as a
refusal, as that of a picture that is decoded does, a tenth of the time refuses ten times as many as can be answered.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, final

from penstock.serve.http.answer_cost import AnswerCost

# Share of the loop's time in which requests are refused, at most, while others need the rest. At 1.5 times the
# capacity, refusals that cost half of an answer need 0.53. And at least.
SHARE, LEAST_SHARE = 0.8, 0.05
# The share suffices for so many times the capacity, where that takes less.
OVERLOAD = 10
# How often the costs are compared.
COMPARED_NS = 100_000_000
# Longest hold in latency budgets. With the time in the socket, a refusal takes at most four.
HELD_BUDGETS = 2.5
# Time of refusals that may be saved up for a burst, and that is given away in one idle iteration of the loop.
BURST_NS, TURN_NS = 5_000_000, 500_000
# An iteration of the loop in which nothing else happened takes less.
IDLE_NS = 50_000
# Processor time of a refusal in the kernel and the event loop, before its bytes are handed over.
RECEIVED_NS = 5_000
# Weight of the newest refusal in the moving average of their cost, and its first value.
FOLLOW, FIRST_NS = 1 / 16, 15_000


class Refused(Protocol):
    """A connection whose client waits for a refusal."""

    def write_refusal(self, refusal: bytes) -> None:
        """Answer its request; nothing happens if the client is gone."""


@final
@dataclass(slots=True, eq=False)
class Refusals:
    """The refusals of one event loop.

    Args:
        budget_ns: Latency budget of a request that names none.
        call_soon: `call_soon` of the event loop: calls a function in the next iteration.
        clock_ns: A monotonic clock.
        share: Share of the loop's time that refusals may take at most.
        answer_cost: Measures what an answer costs; None where the share is fixed.
    """

    budget_ns: int
    call_soon: Callable[[Callable[[], None]], object]
    clock_ns: Callable[[], int]
    share: float = SHARE
    answer_cost: AnswerCost | None = None
    _compared_ns: int = field(default=0, init=False)
    _held: deque[tuple[int, Refused, bytes]] = field(
        default_factory=deque[tuple[int, Refused, bytes]], init=False
    )  # by the time at which they end
    _cost_ns: float = field(default=FIRST_NS, init=False)
    _saved_ns: float = field(default=BURST_NS, init=False)  # time that may be spent on refusals
    _saved_at_ns: int = field(default=0, init=False)
    _scheduled: bool = field(default=False, init=False)
    _ended_ns: int = field(default=0, init=False)

    @property
    def held(self) -> int:
        """Number of refusals that are held, those of clients that are gone included."""
        return len(self._held)

    def observe(self, spent_ns: int) -> None:
        """Note the processor time of a refusal that was not held."""
        self._cost_ns += FOLLOW * (spent_ns + RECEIVED_NS - self._cost_ns)

    def admit(self, now_ns: int) -> bool:
        """Charge a refusal to the share; False if it must be held."""
        if self.answer_cost is not None and now_ns - self._compared_ns > COMPARED_NS:
            self._compared_ns = now_ns
            self._compare(self.answer_cost)
        if self._held:
            return False
        if not self._charge(now_ns):
            return False
        self.count()
        return True

    def hold(self, connection: Refused, refusal: bytes, now_ns: int) -> None:
        """Answer later."""
        held = self._held
        held.append((now_ns + int(HELD_BUDGETS * self.budget_ns), connection, refusal))
        # Not in the loop's next iteration alone: libuv polls many times in one where each poll is full.
        while held[0][0] <= now_ns:
            self._answer_oldest()
        if not self._scheduled:
            self._scheduled, self._ended_ns = True, now_ns
            self.call_soon(self._run)

    def end(self) -> None:
        """Answer all that are held, before the server ends."""
        while self._held:
            _, connection, refusal = self._held.popleft()
            connection.write_refusal(refusal)

    def count(self) -> None:
        """Note a refusal, so that its time is not taken for that of answers."""
        if self.answer_cost is not None:
            self.answer_cost.add_refusal(self._cost_ns)

    def _compare(self, answer_cost: AnswerCost) -> None:
        answer_cost.measure()
        if not answer_cost.ns:
            return
        ratio = self._cost_ns / answer_cost.ns
        # With a share s for refusals, 1 - s of the capacity is answered, and s / ratio times the capacity is refused.
        needed = ratio * (OVERLOAD - 1) / (1 - ratio) if ratio < 1 else SHARE
        self.share = min(SHARE, max(LEAST_SHARE, needed))

    def _charge(self, now_ns: int) -> bool:
        saved_ns = min(BURST_NS, self._saved_ns + (now_ns - self._saved_at_ns) * self.share)
        self._saved_at_ns = now_ns
        if saved_ns <= 0:
            self._saved_ns = saved_ns
            return False
        self._saved_ns = saved_ns - self._cost_ns
        return True

    def _answer_oldest(self) -> None:
        _, connection, refusal = self._held.popleft()
        connection.write_refusal(refusal)
        self.count()

    def _run(self) -> None:
        self._scheduled = False
        begin_ns = now_ns = self.clock_ns()
        idle_until_ns = begin_ns + TURN_NS if begin_ns - self._ended_ns <= IDLE_NS else 0
        held = self._held
        while held and (held[0][0] <= now_ns or now_ns < idle_until_ns or self._charge(now_ns)):
            self._answer_oldest()
            now_ns = self.clock_ns()
        self._ended_ns = now_ns
        if held:
            self._scheduled = True
            self.call_soon(self._run)
