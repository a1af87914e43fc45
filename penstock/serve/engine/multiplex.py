"""Several tables on one device: the choice of the next batch.

Each table has an engine of its own, and all engines share one CPU or GPU. While there is time for all, the table whose
most urgent row must start soonest goes first, but a table that used little of the device waits no longer than a few of
its own batches: by deadlines alone, an overloaded application would make all others wait for as long as their budgets
allow. Where one batch would make another table's rows late, the table with the least device time goes first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from penstock.serve.engine.engine import Engine
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.engine.scheduler import BatchSchedule

# Half-life of the device time that counts as a table's use.
HALF_LIFE_NS = 1_000_000_000
# A table that used less than its equal share waits for so many of its own batches at most. Fewer would make its batches
# smaller, and take more time from the others.
PATIENCE = 4


@dataclass(slots=True)
class _Share:
    engine: Engine | GenerationEngine
    used_ns: float = 0.0
    last_ns: int = 0
    # Since when rows are ready; 0 if none are.
    ready_ns: int = 0


@final
class Multiplexer:
    """Runs one batch a tick, of the table that needs it most.

    Args:
        clock_ns: The clock of the deadlines.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._shares: dict[int, _Share] = {}
        self._halved_ns = clock_ns()

    def add(self, key: int, engine: Engine | GenerationEngine) -> None:
        """Serve another table, under a key of the caller's."""
        least = min((share.used_ns for share in self._shares.values()), default=0.0)
        self._shares[key] = _Share(engine, least)
        if isinstance(engine, Engine):
            engine.others_wait = lambda: self._others_wait(key)

    def remove(self, key: int) -> None:
        """Stop serving a table."""
        del self._shares[key]
        if len(self._shares) == 1:
            next(iter(self._shares.values())).engine.publish_other_tables(0, 0.0)

    def _others_wait(self, key: int) -> bool:
        """Tell whether another table has rows."""
        now_ns = self._clock_ns()
        return any(share.engine.backlog(now_ns).rows for other, share in self._shares.items() if other != key)

    def hold_ns(self) -> int:
        """Compute how long the next batch waits for more rows; 0 where several tables share the device."""
        engine = self._only_engine
        return 0 if engine is None else engine.hold_ns(self._clock_ns())

    def _holds(self, key: int, now_ns: int) -> bool:
        """True if the next batch of a table can wait for more rows, while others have some."""
        engine = self._shares[key].engine
        return isinstance(engine, Engine) and engine.hold_ns(now_ns, contended=True) > 0

    @property
    def gathers(self) -> bool:
        """True if the next batch should have more of the rows that come, see `Engine.gathers`."""
        engine = self._only_engine
        return engine is not None and engine.gathers

    @property
    def _only_engine(self) -> Engine | None:
        engine = next(iter(self._shares.values())).engine if len(self._shares) == 1 else None
        return engine if isinstance(engine, Engine) else None

    def last_batch_ns(self, key: int) -> int:
        """Time at which the last batch of a table began; 0 if it ran none."""
        return self._shares[key].last_ns

    def tick(self) -> tuple[int, BatchSchedule] | None:
        """Run the next batch.

        Returns:
            The key of its table and the rows that ran and expired; None where nothing is ready.
        """
        start_ns = self._clock_ns()
        key = self._next(start_ns)
        if key is None:
            return None
        share = self._shares[key]
        batch = share.engine.tick(start_ns)
        share.used_ns += self._clock_ns() - start_ns
        if batch.run.size:
            share.last_ns = start_ns
            share.ready_ns = 0
        if start_ns - self._halved_ns > HALF_LIFE_NS:
            self._halved_ns = start_ns
            for each in self._shares.values():
                each.used_ns /= 2
        return key, batch

    def _next(self, now_ns: int) -> int | None:
        if len(self._shares) == 1:
            return next(iter(self._shares))
        backlogs = {key: share.engine.backlog(now_ns) for key, share in self._shares.items()}
        used_ns = sum(share.used_ns for share in self._shares.values()) or 1.0
        for key, share in self._shares.items():
            other_tables_ns = sum(each.work_ns for other, each in backlogs.items() if other != key)
            share.engine.publish_other_tables(other_tables_ns, 1 - share.used_ns / used_ns)
            if not backlogs[key].rows:
                share.ready_ns = 0
            elif not share.ready_ns:
                share.ready_ns = now_ns
        # Its batch is under way already, and the device runs one after the other.
        if (running := next((key for key, share in self._shares.items() if share.engine.running), None)) is not None:
            return running
        ready = {key: each for key, each in backlogs.items() if each.rows}
        if not ready:
            return None
        if len(ready) > 1:
            # Chunks of live streams leave the device to others until a larger batch of them is there.
            ready = {key: each for key, each in ready.items() if not self._holds(key, now_ns)} or ready
        late = [
            key
            for key, each in ready.items()
            if each.slack_ns < max((other.batch_ns for rival, other in ready.items() if rival != key), default=0)
        ]
        if late:
            return min(late, key=lambda key: self._shares[key].used_ns)
        least = min(ready, key=lambda key: self._shares[key].used_ns)
        share = self._shares[least]
        if share.used_ns * len(ready) < used_ns and now_ns - share.ready_ns >= PATIENCE * ready[least].batch_ns:
            return least
        return min(ready, key=lambda key: ready[key].slack_ns)
