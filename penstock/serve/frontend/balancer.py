"""Load balancing of requests over the replicas of a model, where a server has several engines.

Each engine has a replica of every model: the network, a table, measured costs. A request goes to the replica with the
earliest predicted finish. Replicas whose predictions differ by no more than those of equal engines count as equally
fast; the one with fewer rows waiting takes it. `penstock.serve.streams.stream_balancer` does the same for streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from penstock.core.errors import Overloaded
from penstock.core.spec import Array
from penstock.serve.frontend.table_writer import NEVER_NS, Done, SlotHandle, TableWriter

# The measured costs of equal engines differ by up to this factor, from other load during the measurement.
ALIKE = 2.0


class PredictedFinish(NamedTuple):
    """Prediction for a request at one replica.

    Args:
        finish_ns: Nanoseconds from now to its result; `NEVER_NS` if it cannot be admitted at all.
        waiting: Rows that finish before it.
    """

    finish_ns: int
    waiting: int


def soonest(predictions: Sequence[PredictedFinish], left_ns: int) -> int:
    """Choose the replica with the earliest predicted finish among those that admit the request.

    Args:
        predictions: One for each replica.
        left_ns: Time left until the deadline.
    """
    admitting = [index for index, prediction in enumerate(predictions) if prediction.finish_ns <= left_ns]
    if not admitting:
        # An idle replica always tries, as an idle server does. Otherwise the one with the earliest finish rejects.
        idle = (not prediction.waiting and prediction.finish_ns < NEVER_NS for prediction in predictions)
        return next((index for index, tries in enumerate(idle) if tries), predictions.index(min(predictions)))
    soonest_ns = min(predictions[index].finish_ns for index in admitting)
    alike = (index for index in admitting if predictions[index].finish_ns <= ALIKE * soonest_ns)
    return min(alike, key=lambda index: predictions[index][::-1])


@final
@dataclass(slots=True, eq=False)
class RequestBalancer:
    """Submits the requests of a model with several replicas, as a `TableWriter` does for one replica.

    Args:
        writers: This front-end's writers of the replicas' tables.
        budget_ns: Latency budget of a request that names none.
    """

    writers: Sequence[TableWriter]
    budget_ns: int

    @property
    def refusing(self) -> bool:
        """True if a replica rejected a request since its last result, so that a rejection may be cached."""
        return any(writer.refusing for writer in self.writers)

    def cached_rejection(self, now_ns: int, left_ns: int = 0) -> Overloaded | None:
        """Return a rejection if every replica would reject a request with this much time left; None otherwise."""
        rejection: Overloaded | None = None
        for writer in self.writers:
            error = writer.cached_rejection(now_ns, left_ns)
            # Only the replica that was chosen has a cached rejection; the others are predicted.
            if error is None and not self._rejects(writer, left_ns):
                return None
            rejection = rejection or error
        return rejection

    def choose(
        self, left_ns: int, budget_ns: int | None, *, rows: int = 1, low_priority: bool = False, length: int = 0
    ) -> TableWriter:
        """Choose the replica for a request with this much time left; see `TableWriter.predict`."""
        writers = self.writers
        if len(writers) == 1:
            return writers[0]
        budget_ns = budget_ns or self.budget_ns
        predictions = [PredictedFinish(*writer.predict(rows, budget_ns, low_priority, length)) for writer in writers]
        return writers[soonest(predictions, left_ns)]

    def submit(
        self,
        chunk: Array | bytes,
        *,
        done: Done,
        arrival_ns: int,
        now_ns: int,
        budget_ns: int | None = None,
        low_priority: bool = False,
    ) -> SlotHandle:
        """Submit a request to the replica that is chosen for it, see `TableWriter.submit`."""
        left_ns = arrival_ns + (budget_ns or self.budget_ns) - now_ns
        writer = self.writers[0]
        length = writer.length_of(chunk) if writer.shortest_length else 0
        return self.choose(left_ns, budget_ns, low_priority=low_priority, length=length).submit(
            chunk, done=done, arrival_ns=arrival_ns, budget_ns=budget_ns, now_ns=now_ns, low_priority=low_priority
        )

    def _rejects(self, writer: TableWriter, left_ns: int) -> bool:
        # Of any length, where lengths vary.
        for length in writer.shortest_lengths:
            finish_ns, waiting = writer.predict(1, self.budget_ns, False, length)
            if finish_ns < NEVER_NS and (waiting <= 0 or finish_ns <= left_ns):
                return False
        return True
