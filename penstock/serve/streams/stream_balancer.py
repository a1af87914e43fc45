"""Load balancing of live streams over the replicas of a model; a stream stays where its state is."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from penstock.core.errors import Overloaded
from penstock.serve.streams.quotas import UNKNOWN, StreamClient
from penstock.serve.streams.streams import M, Member, Streams, waiting_error
from penstock.serve.table.slots import STREAMS_REFUSED

# The measured costs of equal engines differ by up to this factor at large batches, which are measured at start only.
ALIKE_LARGE = 4.0


class StreamLoad(NamedTuple):
    """Load of a replica.

    Args:
        streams: Number of streams that are open there or still hold a slot.
        most: Estimated capacity in streams.
    """

    streams: int
    most: float


def by_load(loads: Sequence[StreamLoad]) -> list[int]:
    """Order the replicas for the next stream, the lowest load relative to capacity first."""
    best = max(load.most for load in loads)

    def share(index: int) -> float:
        streams, most = loads[index]
        return (streams + 1) / (most if ALIKE_LARGE * most < best else best)

    return sorted(range(len(loads)), key=share)


@final
class StreamBalancer:
    """The interface of `Streams` for a model with several replicas.

    Args:
        replicas: The streams of each replica.
    """

    def __init__(self, replicas: Sequence[Streams]) -> None:
        self._replicas = replicas
        first = replicas[0]
        self.application = first.application
        self.budget_ns = first.budget_ns
        self.quotas = first.quotas

    def admit_stream(self, make: Callable[[Streams], M], budget_ns: int, client: StreamClient = UNKNOWN) -> M:
        """Take a stream in where least is carried, see `Streams.admit_stream`.

        Raises:
            QuotaExceeded: The client holds as many as it may.
            Overloaded: No replica can carry one more.
            DeadlineImpossible: Nobody can have that budget.
        """
        taking = self._taking(budget_ns)
        if taking is None:
            self._replicas[0].counts[STREAMS_REFUSED] += 1
            raise self._full(budget_ns)
        return taking.admit_stream(make, budget_ns, client)

    def reject_replacement(self, before: Member, budget_ns: int, *, busy: bool) -> None:
        """See whether a stream could be taken in in the place of another one, see `Streams.reject_replacement`."""
        if self._taking(budget_ns) is None:
            its = next((streams for streams in self._replicas if before in streams), self._replicas[0])
            its.reject_replacement(before, budget_ns, busy=busy)

    def reject_impossible(self, budget_ns: int) -> None:
        """See whether anybody can have a budget.

        Raises:
            DeadlineImpossible: Nobody can.
        """
        for streams in self._replicas:
            if budget_ns >= streams.min_compute_ns:
                return
        self._replicas[0].reject_impossible(budget_ns)

    def _taking(self, budget_ns: int) -> Streams | None:
        self.reject_impossible(budget_ns)
        for streams in _by_load(self._replicas, budget_ns):
            if (
                budget_ns >= streams.min_compute_ns
                and streams.writer.next_slot is not None
                and streams.has_capacity(budget_ns)
            ):
                return streams
        return None

    def _full(self, budget_ns: int) -> Overloaded:
        retry_after_s = min(streams.retry_after_s for streams in self._replicas)
        if waiting := self._replicas[0].waiting.waiting:
            return waiting_error(waiting, retry_after_s)
        if any(streams.has_capacity(budget_ns) for streams in self._replicas):
            return Overloaded("All slots are in use; come back later.", retry_after_s)
        count = sum(streams.open_everywhere for streams in self._replicas)
        return Overloaded(f"{count:,} streams are open, as many as keep {budget_ns / 1e6:g} ms.", retry_after_s)


def resume_waiting(replicas: Sequence[Streams]) -> int:
    """Let engines go on with streams of a model that wait for one, as many as there is room for; returns their number.

    Args:
        replicas: The streams of the replicas of the model, one at least.
    """
    waiting, budget_ns, count = replicas[0].waiting, replicas[0].budget_ns, 0
    waiting.count_in(replicas[0].counts)
    for stream in waiting.first():
        # Under the server's own budget, as for new streams: one that asked for less may be answered late.
        taking = next((one for one in _by_load(replicas, budget_ns) if one.has_place(budget_ns)), None)
        if taking is None:
            break
        stream.resume(taking)
        count += 1
    return count


def _by_load(replicas: Sequence[Streams], budget_ns: int) -> list[Streams]:
    loads = [StreamLoad(streams.carried_everywhere, streams.most(budget_ns)) for streams in replicas]
    return [replicas[index] for index in by_load(loads)]
