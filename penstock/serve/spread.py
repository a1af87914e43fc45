"""Which replica of a model takes the next request or the next stream, where a server has several engines.

Each engine has a replica of every model: the network, a table, measured costs. What comes by HTTP, gRPC or WebSocket,
as a request, a recording, a sequence or a stream, is assigned here, once; a stream stays where its state is. Replicas
whose predictions differ by no more than those of equal engines count as equally fast: the one with less to do takes it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from penstock.core.errors import Overloaded
from penstock.core.spec import Array
from penstock.serve.frontend import FOR_EVER_NS, Done, Frontend, Ticket
from penstock.serve.slots import STREAMS_REFUSED
from penstock.serve.streams import M, Member, Stream, Streams

# What else a machine did while it was measured makes equal engines differ by as much. Those of large batches, which say
# how many streams can be carried, are of the start for as long as nothing runs that is as large.
ALIKE, ALIKE_LARGE = 2.0, 4.0


class Prospect(NamedTuple):
    """What would become of a request at a replica.

    Args:
        finish_ns: When it would be answered, from now; for ever where it cannot be taken in at all.
        waiting: How many rows are answered before.
    """

    finish_ns: int
    waiting: int


class Load(NamedTuple):
    """What a replica carries.

    Args:
        streams: All that are open there, or hold a slot still.
        most: About how many there may be.
    """

    streams: int
    most: float


def soonest(prospects: Sequence[Prospect], left_ns: int) -> int:
    """The replica that takes a request: of those that admit it the one that answers soonest.

    Args:
        prospects: Of each replica.
        left_ns: How long it may take.
    """
    admitting = [index for index, prospect in enumerate(prospects) if prospect.finish_ns <= left_ns]
    if not admitting:
        # One that is idle always tries, as an idle server does. Else the one that is the least late refuses for all.
        idle = (not prospect.waiting and prospect.finish_ns < FOR_EVER_NS for prospect in prospects)
        return next((index for index, tries in enumerate(idle) if tries), prospects.index(min(prospects)))
    least_ns = min(prospects[index].finish_ns for index in admitting)
    alike = (index for index in admitting if prospects[index].finish_ns <= ALIKE * least_ns)
    return min(alike, key=lambda index: prospects[index][::-1])


def by_load(loads: Sequence[Load]) -> list[int]:
    """The replicas in the order in which they should take the next stream: the one first that carries least of what
    it can."""
    best = max(load.most for load in loads)

    def share(index: int) -> float:
        streams, most = loads[index]
        return (streams + 1) / (most if ALIKE_LARGE * most < best else best)

    return sorted(range(len(loads)), key=share)


@final
class SpreadRequests:
    """What a `Frontend` is to a model with one replica, for a model with several.

    Args:
        frontends: This front-end's sides of the replicas' tables.
        budget_ns: The latency budget of a request that names none.
    """

    def __init__(self, frontends: Sequence[Frontend], budget_ns: int) -> None:
        self._frontends = frontends
        self._budget_ns = budget_ns

    @property
    def refusing(self) -> bool:
        """Whether one was refused since the last result, so that `standing` is worth asking."""
        return any(frontend.refusing for frontend in self._frontends)

    def standing(self, now_ns: int, left_ns: int = 0) -> Overloaded | None:
        """Why a request would be refused that must be answered within so long; None where that must be worked out."""
        standing: Overloaded | None = None
        for frontend in self._frontends:
            error = frontend.standing(now_ns, left_ns)
            # Where none stands, as with those that were not the first to answer what was refused, it is worked out.
            if error is None and not self._refuses(frontend, left_ns):
                return None
            standing = standing or error
        return standing

    def chosen(self, left_ns: int, budget_ns: int | None, *, rows: int = 1, background: bool = False) -> Frontend:
        """Where a request belongs that must be answered within so long."""
        frontends = self._frontends
        if len(frontends) == 1:
            return frontends[0]
        budget_ns = budget_ns or self._budget_ns
        prospects = [Prospect(*frontend.prospect(rows, budget_ns, background)) for frontend in frontends]
        return frontends[soonest(prospects, left_ns)]

    def submit(
        self,
        chunk: Array | bytes,
        *,
        done: Done,
        arrival_ns: int,
        budget_ns: int | None = None,
        now_ns: int | None = None,
        background: bool = False,
        alone: bool = True,
    ) -> Ticket:
        """Put in a request, see `Frontend.submit`."""
        left_ns = arrival_ns + (budget_ns or self._budget_ns) - (now_ns or arrival_ns)
        return self.chosen(left_ns, budget_ns, background=background).submit(
            chunk,
            done=done,
            arrival_ns=arrival_ns,
            budget_ns=budget_ns,
            now_ns=now_ns,
            background=background,
            alone=alone,
        )

    def _refuses(self, frontend: Frontend, left_ns: int) -> bool:
        finish_ns, waiting = frontend.prospect(1, self._budget_ns, False)
        return finish_ns >= FOR_EVER_NS or (waiting > 0 and finish_ns > left_ns)


@final
class SpreadStreams:
    """What `Streams` are to a model with one replica, for a model with several.

    Args:
        replicas: The streams of each.
    """

    def __init__(self, replicas: Sequence[Streams]) -> None:
        self._replicas = replicas
        first = replicas[0]
        self.application = first.application
        self.live = first.live
        self.budget_ns = first.budget_ns
        self.arrived = first.arrived
        self.now_ns = first.now_ns
        self.why = first.why

    def open(self) -> Stream:
        """Take a stream of a WebSocket in, see `take_in`."""
        return self.take_in(Stream, self.budget_ns)

    def take_in(self, make: Callable[[Streams], M], budget_ns: int) -> M:
        """Take a stream in where least is carried, see `Streams.take_in`.

        Raises:
            Overloaded: No replica can carry one more.
            DeadlineImpossible: Nobody can have that budget.
        """
        taking = self._taking(budget_ns)
        if taking is None:
            self._replicas[0].counts[STREAMS_REFUSED] += 1
            raise self._full(budget_ns)
        return taking.take_in(make, budget_ns)

    def refuse_replacement(self, before: Member, budget_ns: int, *, busy: bool) -> None:
        """See whether a stream could be taken in in the place of another one, see `Streams.refuse_replacement`."""
        if self._taking(budget_ns) is None:
            its = next((streams for streams in self._replicas if before in streams), self._replicas[0])
            its.refuse_replacement(before, budget_ns, busy=busy)

    def refuse_impossible(self, budget_ns: int) -> None:
        """See whether anybody can have a budget.

        Raises:
            DeadlineImpossible: Nobody can.
        """
        for streams in self._replicas:
            if budget_ns >= streams.least_ns:
                return
        self._replicas[0].refuse_impossible(budget_ns)

    def _taking(self, budget_ns: int) -> Streams | None:
        self.refuse_impossible(budget_ns)
        replicas = self._replicas
        for index in by_load([Load(streams.carried_everywhere, streams.most(budget_ns)) for streams in replicas]):
            streams = replicas[index]
            if budget_ns >= streams.least_ns and streams.frontend.next_slot is not None and streams.carries(budget_ns):
                return streams
        return None

    def _full(self, budget_ns: int) -> Overloaded:
        retry_after_s = min(streams.retry_after_s for streams in self._replicas)
        if any(streams.carries(budget_ns) for streams in self._replicas):
            return Overloaded("All slots are in use; come back later.", retry_after_s)
        count = sum(streams.open_everywhere for streams in self._replicas)
        return Overloaded(f"{count:,} streams are open, as many as keep {budget_ns / 1e6:g} ms.", retry_after_s)
