"""The tables that a front-end works on: attached when a model is ready, let go of when nobody waits for it any more."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import final

from penstock.core.application import find_application
from penstock.core.bundle import read_manifest
from penstock.core.errors import BundleError
from penstock.serve.frames import RESTART
from penstock.serve.frontend import Frontend
from penstock.serve.messages import Loaded
from penstock.serve.models import Models
from penstock.serve.served import Served
from penstock.serve.slots import ANSWERED, SlotTable, TableLayout

# How often a front-end looks whether the last client of a retired model got its answer.
LOOK_S = 0.005


@final
class Attachments:
    """Of one front-end, by the key that names each table in all processes.

    Args:
        models: What requests find by name; kept up to date here.
        budget_ns: The latency budget of a request that names none.
        idle_ns: For so long nothing may come of a sequence.
        margin_ns: How much later than predicted an answer may come, since reading goes on.
        index: Which of the front-ends this is.
        wake: Called when there is something new for the engine.
        arrived: Told of each request that was read, and when; gives the earliest moment at which it can have come.
        now_ns: The engine's clock.
    """

    def __init__(
        self,
        models: Models,
        *,
        budget_ns: int,
        idle_ns: int,
        margin_ns: int,
        index: int,
        wake: Callable[[], None],
        arrived: Callable[[int], int],
        now_ns: Callable[[], int],
    ) -> None:
        self._models = models
        self._budget_ns = budget_ns
        self._idle_ns = idle_ns
        self._margin_ns = margin_ns
        self._index = index
        self._wake = wake
        self._arrived = arrived
        self._now_ns = now_ns
        self._served: dict[int, Served] = {}
        self._answered_before = 0
        # Whose engine is gone, until another table has their names.
        self._lost: dict[int, Served] = {}

    @property
    def answered(self) -> int:
        """Requests that got an answer, of all tables that were ever attached."""
        return self._answered_before + sum(served.counts[ANSWERED] for served in self._served.values())

    @property
    def in_use(self) -> int:
        """Requests that wait for their answers."""
        return sum(served.frontend.in_use for served in self._served.values())

    def attach(self, loaded: Loaded, memory: SlotTable | int) -> None:
        """Let a model that is ready answer to its name, and again where another one took it meanwhile.

        Args:
            loaded: What the engine said of it.
            memory: Its table, or the descriptor of its memory.

        Raises:
            PenstockError: The bundle or its application are not what the engine loaded.
        """
        order = loaded.order
        known = self._served.get(order.key)
        if known is not None:
            self._models.put(known)
            return
        manifest = read_manifest(Path(order.bundle))
        if manifest.content_hash != loaded.bundle_hash:
            raise BundleError(f"{order.bundle} was replaced while it was loaded; load it again.")
        application = find_application(loaded.application).application
        if isinstance(memory, int):
            layout = TableLayout(
                slots=loaded.slots,
                chunks=application.chunks,
                input=application.input,
                output=application.output,
                frontends=loaded.frontends,
            )
            memory = SlotTable.attached(layout, memory)
        frontend = Frontend(
            memory, budget_ns=self._budget_ns, wake=self._wake, index=self._index, margin_ns=self._margin_ns
        )
        served = Served(
            name=order.name,
            version=order.version,
            application=application,
            manifest=manifest,
            frontend=frontend,
            table=memory,
            budget_ns=self._budget_ns,
            idle_ns=self._idle_ns,
            arrived=self._arrived,
            now_ns=self._now_ns,
        )
        self._served[order.key] = served
        self._lost = {key: lost for key, lost in self._lost.items() if lost.name != order.name}
        self._models.put(served)

    async def retire(self, key: int) -> None:
        """Put nothing more into a table; returns when nobody waits for it any more."""
        served = self._served.get(key) or self._lost.pop(key, None)
        if served is None:
            return
        self._models.take_out(served)
        if served.streams is not None:
            served.streams.finish(RESTART, "Another version is served now, or none; open another stream.")
        while served.frontend.in_use and not served.engine_lost:
            await asyncio.sleep(LOOK_S)
        if self._served.pop(key, None) is not None:
            self._answered_before += served.counts[ANSWERED]

    def lose_engine(self) -> None:
        """The engine is gone: whoever waits is told; the models stay known until their next tables come."""
        lost, self._served = self._served, {}
        self._lost |= lost
        for served in lost.values():
            served.lose_engine()
            self._answered_before += served.counts[ANSWERED]

    def sweep(self) -> None:
        """End the sequences of which nothing came for too long."""
        now_ns = self._now_ns()
        for served in self._served.values():
            if served.sequences is not None:
                served.sequences.sweep(now_ns)

    def begin_no_more(self) -> None:
        """The server is going down: no sequence begins any more."""
        for served in self._served.values():
            if served.sequences is not None:
                served.sequences.close()

    def frontend(self, key: int) -> Frontend | None:
        """The front-end's side of a table."""
        served = self._served.get(key)
        return None if served is None else served.frontend

    def collect(self) -> int:
        """Hand out the results of every table; gives how many there were."""
        count = 0
        for served in list(self._served.values()):
            taken = served.frontend.collect()
            if taken:
                served.frontend.refresh()
                count += taken
        return count
