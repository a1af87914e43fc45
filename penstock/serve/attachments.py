"""The tables that a front-end works on: attached when a model is ready, let go of when nobody waits for it any more."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.application import Application, find_application
from penstock.core.bundle import Manifest, read_manifest, read_prepare
from penstock.core.errors import BundleError
from penstock.serve.frames import RESTART
from penstock.serve.frontend import Frontend
from penstock.serve.messages import Loaded, Order
from penstock.serve.models import Models
from penstock.serve.preparing import Preparing
from penstock.serve.served import Replica, Served, refusal_of
from penstock.serve.slots import ANSWERED, SlotTable, TableLayout
from penstock.serve.streams import Streams

# How often a front-end looks whether the last client of a retired model got its answer.
LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class _Attached:
    model: int
    served: Served
    replica: Replica


@final
class Attachments:
    """Of one front-end, by the key that names each table in all processes.

    Args:
        models: What requests find by name; kept up to date here.
        budget_ns: The latency budget of a request that names none.
        idle_ns: For so long nothing may come of a sequence.
        margin_ns: How much later than predicted an answer may come, since reading goes on.
        index: Which of the front-ends this is.
        wakes: Of each engine, called when there is something new for it.
        arrived: Told of each request that was read, and when; gives the earliest moment at which it can have come.
        now_ns: The engines' clock.
    """

    def __init__(
        self,
        models: Models,
        *,
        budget_ns: int,
        idle_ns: int,
        margin_ns: int,
        index: int,
        wakes: Sequence[Callable[[], None]],
        arrived: Callable[[int], int],
        now_ns: Callable[[], int],
    ) -> None:
        self._models = models
        self._budget_ns = budget_ns
        self._idle_ns = idle_ns
        self._margin_ns = margin_ns
        self._index = index
        self._wakes = wakes
        self._arrived = arrived
        self._now_ns = now_ns
        # By the key of the table, and the models by the number that their replicas share.
        self._attached: dict[int, _Attached] = {}
        self._served: dict[int, Served] = {}
        self._frontends: list[Frontend] = []
        self._answered_before = 0
        # Whose last engine is gone, by the key of its table, until another table has their names.
        self._lost: dict[int, Served] = {}

    @property
    def answered(self) -> int:
        """Requests that got an answer, of all tables that were ever attached."""
        return self._answered_before + sum(frontend.counts[ANSWERED] for frontend in self._frontends)

    @property
    def in_use(self) -> int:
        """Requests that wait for their answers."""
        return sum(frontend.in_use for frontend in self._frontends)

    def attach(self, loaded: Loaded, memory: SlotTable | int) -> None:
        """Let a model that is ready answer to its name, and again where another one took it meanwhile.

        Args:
            loaded: What an engine said of it. What another engine said of it before makes this one a replica.
            memory: Its table, or the descriptor of its memory.

        Raises:
            PenstockError: The bundle or its application are not what the engine loaded.
        """
        order = loaded.order
        attached = self._attached.get(order.key)
        if attached is not None:
            self._models.put(attached.served)
            return
        served = self._served.get(order.model)
        manifest = read_manifest(Path(order.bundle)) if served is None else served.manifest
        if manifest.content_hash != loaded.bundle_hash:
            if served is None:
                raise BundleError(f"{order.bundle} was replaced while it was loaded; load it again.")
            raise BundleError(
                f"{order.bundle} holds another bundle now than the one that is served; load the model again, or start "
                "the server anew."
            )
        application = find_application(loaded.application).application if served is None else served.application
        replica = self._replica(loaded, application, memory)
        if served is None:
            served = self._served[order.model] = self._named(order, manifest, application, replica)
        else:
            served.join(replica)
        self._attached[order.key] = _Attached(order.model, served, replica)
        self._list_frontends()

    async def retire(self, key: int) -> None:
        """Put nothing more into a table; returns when nobody waits for it any more."""
        lost = self._lost.pop(key, None)
        if lost is not None:
            self._models.take_out(lost)
        attached = self._attached.get(key)
        if attached is None:
            return
        served, replica = attached.served, attached.replica
        others = served.part(replica)
        if not others:
            self._models.take_out(served)
        if replica.streams is not None:
            replica.streams.finish(RESTART, "Another version is served now, or none; open another stream.")
        while key in self._attached and (replica.frontend.in_use or (served.is_preparing and not others)):
            await asyncio.sleep(LOOK_S)
        if key in self._attached:
            self._answered_before += replica.frontend.counts[ANSWERED]
            self._let_go(key)

    def lose_engine(self, engine: int) -> None:
        """An engine is gone: whoever waits for it is told; what no other has stays known until its next table comes."""
        for key, attached in list(self._attached.items()):
            served, replica = attached.served, attached.replica
            if replica.engine != engine:
                continue
            self._let_go(key)
            served.lose(replica)
            if served.engine_lost:
                # Else it is a version that goes, or one that is gone.
                if served in self._models:
                    self._lost[key] = served
                self._answered_before += replica.frontend.counts[ANSWERED]

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
        attached = self._attached.get(key)
        return None if attached is None else attached.replica.frontend

    def collect(self) -> int:
        """Hand out the results of every table; gives how many there were."""
        count = 0
        for frontend in self._frontends:
            taken = frontend.collect()
            if taken:
                frontend.refresh()
                count += taken
        return count

    def _named(self, order: Order, manifest: Manifest, application: Application, replica: Replica) -> Served:
        served = Served(
            name=order.name,
            version=order.version,
            application=application,
            manifest=manifest,
            replica=replica,
            several=len(self._wakes) > 1,
            budget_ns=self._budget_ns,
            idle_ns=self._idle_ns,
            arrived=self._arrived,
            now_ns=self._now_ns,
            preparing=self._preparing(order, manifest, application),
        )
        self._lost = {key: lost for key, lost in self._lost.items() if lost.name != order.name}
        self._models.put(served)
        return served

    def _preparing(self, order: Order, manifest: Manifest, application: Application) -> Preparing | None:
        if manifest.raw is None or application.decode is None:
            return None
        # Only here: most applications prepare nothing, and ONNX Runtime takes its time to load.
        from penstock.runtime.prepared import Prepared

        prepared = Prepared(read_prepare(Path(order.bundle), manifest), manifest.raw, manifest.input)
        return Preparing(order.name, application.decode, prepared, self._now_ns)

    def _replica(self, loaded: Loaded, application: Application, memory: SlotTable | int) -> Replica:
        if isinstance(memory, int):
            layout = TableLayout(
                slots=loaded.slots,
                chunks=application.chunks,
                input=application.input,
                output=application.output,
                frontends=loaded.frontends,
            )
            memory = SlotTable.attached(layout, memory)
        budget_ns = self._budget_ns
        frontend = Frontend(
            memory,
            budget_ns=budget_ns,
            wake=self._wakes[loaded.engine],
            index=self._index,
            margin_ns=self._margin_ns,
        )
        streams = None
        if application.live is not None:
            streams = Streams(
                name=loaded.order.name,
                application=application,
                frontend=frontend,
                table=memory,
                budget_ns=budget_ns,
                arrived=self._arrived,
                now_ns=self._now_ns,
                why=lambda status, own_ns: refusal_of(status, budget_ns if own_ns is None else own_ns),
            )
        return Replica(engine=loaded.engine, device=loaded.device, frontend=frontend, table=memory, streams=streams)

    def _let_go(self, key: int) -> None:
        model = self._attached.pop(key).model
        if all(attached.model != model for attached in self._attached.values()):
            preparing = self._served.pop(model).preparing
            if preparing is not None:
                preparing.close()
        self._list_frontends()

    def _list_frontends(self) -> None:
        # Another list each time: it may be changed while it is gone over.
        self._frontends = [attached.replica.frontend for attached in self._attached.values()]
