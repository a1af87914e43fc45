"""Moves of connections between front-ends, so that each has its share of the work.

The kernel spreads new connections by a hash, which does not know their load. A proxy that keeps ten of them open may
have five at one front-end and none at another, and a front-end that was started again has none of those that live long.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from penstock.serve.control.child import ChildProcess
from penstock.serve.messages import FrontendUse, HandOver

# Time between two plans.
PLAN_S = 1.0
# A front-end that reported nothing for this time takes part in no plan: it may hang.
OLD_S = 2.0
# Share of a core below which a front-end keeps its connections.
LEAST_BUSY = 0.1
# Least difference of two front-ends, as a share of a core and of what the busier one uses.
LEAST_DIFFERENCE, LEAST_RELATIVE = 0.06, 0.1
# Weight of the newest second in the mean.
NEWEST = 0.5
# Connections of one move. They are under way for less than a second, and a process that is stopped meanwhile keeps so
# many descriptors for others at most.
MAX_MOVED = 500
# A report that comes so soon after a move is of the time before it, in part.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionMove:
    """Connections that change their front-end.

    Args:
        source: Index of the front-end that hands them over.
        target: Index of the one that takes them.
        count: Their number.
    """

    source: int
    target: int
    count: int


def plan_moves(loads: Mapping[int, FrontendUse]) -> list[ConnectionMove]:
    """Plan moves that bring the busiest front-ends and the idlest ones together.

    The busiest hands over to the idlest, the second busiest to the second idlest, and so on, so that none is sent more
    than from one. Each move is as many connections as even the two out, if each does as much as the average of those
    that can be moved, up to `MAX_MOVED`; none where the target would have more afterwards than the source had before.

    Args:
        loads: The front-ends that take part, by index.
    """
    order = sorted(loads, key=lambda index: (loads[index].busy, index))
    moves = list[ConnectionMove]()
    for target, source in zip(order[: len(order) // 2], reversed(order), strict=False):
        give, take = loads[source], loads[target]
        difference = give.busy - take.busy
        if give.busy < LEAST_BUSY or difference < max(LEAST_DIFFERENCE, LEAST_RELATIVE * give.busy):
            break  # those between them differ less
        if not give.movable:
            continue
        each = give.busy / give.movable
        if each < difference and (count := min(round(difference / (2 * each)), give.movable, take.room, MAX_MOVED)) > 0:
            moves.append(ConnectionMove(source, target, count))
    return moves


@final
class ConnectionBalance:
    """Has front-ends hand over connections, by what they report each second.

    Args:
        frontends: The front-ends.
        now_s: A monotonic clock.
    """

    def __init__(self, frontends: Sequence[ChildProcess], now_s: Callable[[], float] = time.monotonic) -> None:
        self._frontends = frontends
        self._now_s = now_s
        # The last report, with the mean of those until then, its time, and the process that sent it.
        self._loads: dict[int, tuple[FrontendUse, float, int]] = {}
        # Until when reports of a front-end say nothing.
        self._settles_s: dict[int, float] = {}
        self._planned_s = 0.0

    def note(self, child: ChildProcess, use: FrontendUse) -> None:
        """Note a report, and have connections handed over where it is time for a plan."""
        now_s = self._now_s()
        if now_s < self._settles_s.get(child.index, 0.0):
            return
        before = self._loads.get(child.index)
        if before is not None and before[2] == child.starts:
            use = replace(use, busy=NEWEST * use.busy + (1 - NEWEST) * before[0].busy)
        self._loads[child.index] = use, now_s, child.starts
        if now_s - self._planned_s >= PLAN_S:
            self._planned_s = now_s
            self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        loads = {
            index: load
            for index, (load, since_s, starts) in self._loads.items()
            if now_s - since_s < OLD_S and self.takes(child := self._frontends[index]) and child.starts == starts
        }
        for move in plan_moves(loads):
            self._frontends[move.source].send(HandOver(count=move.count, target=move.target))
            for index in (move.source, move.target):
                del self._loads[index]
                self._settles_s[index] = now_s + SETTLE_S

    def target(self, wanted: int, source: ChildProcess) -> ChildProcess | None:
        """Return the front-end that takes a connection; None if none can.

        Args:
            wanted: Index of the one that the connection was planned for.
            source: The one that gave it up, which takes it back where the other one is gone: it had room for it.
        """
        order = (self._frontends[wanted], source, *self._frontends)
        return next((child for child in order if self.takes(child)), None)

    @staticmethod
    def takes(child: ChildProcess) -> bool:
        """Tell whether a front-end serves every model and answers at present."""
        # The last messages of a process that has ended come while it still counts as serving.
        return child.alive and child.answers
