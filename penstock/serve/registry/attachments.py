"""The tables of a front-end: attached when a model is ready, detached when its last request is answered."""

import asyncio
import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from websockets.frames import CloseCode

from penstock.core.application import Application
from penstock.core.bundles.bundle import LANGUAGE, Manifest, read_manifest, read_prepare
from penstock.core.decode import import_decoders
from penstock.core.errors import BundleError
from penstock.core.picture_file import PictureFile
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.frontend.beam_process import BeamModel, BeamProcess
from penstock.serve.frontend.decode_pool import DecodePool, is_no_large_picture, is_small_picture
from penstock.serve.frontend.second_tries import SecondTries
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.messages import LoadModel, ModelLoaded
from penstock.serve.pinned_content import pinned_bundle, pinned_reference
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import Replica, ServedModel, status_error
from penstock.serve.streams.quotas import StreamQuotas
from penstock.serve.streams.replay_ring import ReplayLimits
from penstock.serve.streams.resumptions import Resumptions
from penstock.serve.streams.session_tickets import max_ticket_bytes
from penstock.serve.streams.stream_tickets import StreamTickets
from penstock.serve.streams.streams import Member, Streams
from penstock.serve.streams.tickets import TicketSealer
from penstock.serve.table.generation_costs import budgets_ns
from penstock.serve.table.slots import ANSWERED, BEAM_RESTARTS, SlotTable, TableLayout

log = logging.getLogger(__name__)

# Response header with `version_hash`.
VERSION_HEADER = "Penstock-Version"
# Interval between attempts to find room for streams that wait for an engine.
RESUME_EACH_NS = 10_000_000
# Poll interval while the last requests of a retired model are answered.
POLL_S = 0.005


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Attachments:
    """Tables of one front-end, by the key that identifies each table in all processes.

    Args:
        models: The registry; models are added to it and removed from it here.
        budget_ns: Latency budget of a request that names none.
        idle_ns: Time without a request after which a sequence ends.
        margin_ns: Added to predicted finishes, for reading that goes on meanwhile.
        index: Index of this front-end.
        wakes: For each engine, called when there is new work for it.
        batch_loop: Has the arrival time of the bytes read now.
        now_ns: The engines' clock.
        quotas: Limits the live streams of one client.
        replay: Limits of replays; None where live streams end with their engine.
        headroom: See `Streams`.
        beams: Decodes utterances again; its process is started with the first model that needs it.
        sealer: Seals the tickets of live streams; None where there are none.
        ticket_s: Signal between two tickets of a stream, in seconds.
    """

    models: ModelRegistry
    budget_ns: int
    idle_ns: int
    margin_ns: int
    index: int
    wakes: Sequence[Callable[[], None]]
    batch_loop: BatchLoop
    now_ns: Callable[[], int]
    quotas: StreamQuotas = field(default_factory=StreamQuotas)
    replay: ReplayLimits | None = None
    headroom: float = 0.0
    beams: BeamProcess = field(default_factory=BeamProcess)
    sealer: TicketSealer | None = None
    ticket_s: float = 5.0
    _second_tries: SecondTries = field(init=False)
    # By the key of the table; models by the number that their replicas share.
    _attached: dict[int, tuple[ServedModel, Replica]] = field(
        init=False, default_factory=dict[int, tuple[ServedModel, Replica]]
    )
    _served: dict[int, ServedModel] = field(init=False, default_factory=dict[int, ServedModel])
    _writers: list[TableWriter] = field(init=False, default_factory=list[TableWriter])
    _answered_before: int = field(init=False, default=0)
    # Models whose last engine is lost, by the key of their table, until a new table has their name.
    _lost: dict[int, ServedModel] = field(init=False, default_factory=dict[int, ServedModel])
    # Live streams that wait for an engine, by the number of their model and the hash of its bundle.
    _resumptions: dict[tuple[int, str], Resumptions[Member]] = field(
        init=False, default_factory=dict[tuple[int, str], Resumptions[Member]]
    )
    # By the number of their model and the hash of its bundle.
    _beams: dict[tuple[int, str], BeamModel] = field(init=False, default_factory=dict[tuple[int, str], BeamModel])
    # Restarts of the beam process that are counted.
    _beam_restarts: int = field(init=False, default=0)
    _resumed_ns: int = field(init=False, default=0)
    _draining: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        # For all models, whose engines they share; it outlives those whose last engine is lost.
        self._second_tries = SecondTries(self.now_ns)

    @property
    def answered(self) -> int:
        """Requests that were answered, over all tables ever attached."""
        return self._answered_before + sum(writer.counts[ANSWERED] for writer in self._writers)

    @property
    def in_use(self) -> int:
        """Requests that are being answered."""
        return sum(writer.in_use for writer in self._writers)

    def attach(self, loaded: ModelLoaded, memory: SlotTable | int) -> None:
        """Serve a model that an engine has loaded, under its name.

        Args:
            loaded: The engine's message. A model that another engine loaded before gets one more replica.
            memory: Its table, or the descriptor of its memory.

        Raises:
            PenstockError: The bundle or its application differ from what the engine loaded.
        """
        command = loaded.command
        if command.key in self._attached:
            self.models.put(self._attached[command.key][0])
            return
        served = self._served.get(command.model)
        manifest = read_manifest(_bundle_of(command)) if served is None else served.manifest
        if manifest.content_hash != loaded.bundle_hash:
            if served is None:
                raise BundleError(f"{command.bundle} was replaced while it was loaded; load it again.")
            raise BundleError(
                f"{command.bundle} holds another bundle now than the one that is served; load the model again, or "
                "restart the server."
            )
        if served is None:
            found = find_application(pinned_reference(command.pinned) or loaded.application)
            version = version_hash(manifest, found)
            try:
                beam = self._beam(command, manifest, found.application)
                replica = self._replica(loaded, found.application, memory, beam, version)
                served = self._served[command.model] = self._named(command, manifest, found, replica, beam)
            finally:
                # That of a model which could not be attached.
                self._drop_beams()
        else:
            version = dict(served.version_headers)[VERSION_HEADER]
            replica = self._replica(loaded, served.application, memory, served.beam, version)
            served.add_replica(replica)
        self._attached[command.key] = served, replica
        self._list_writers()
        # Before any new stream can come.
        served.resume_streams()

    def has_imported(self, command: LoadModel) -> bool:
        """Tell whether the application of a model is imported: another engine's table of it is attached."""
        return command.model in self._served

    async def retire(self, key: int) -> None:
        """Submit nothing more to a table; return when its last request is answered."""
        lost = self._lost.pop(key, None)
        if lost is not None:
            self.models.take_out(lost)
            lost.give_up_streams()
        if key not in self._attached:
            self._drop_beams()
            return
        served, replica = self._attached[key]
        others = served.remove_replica(replica)
        if not others:
            self.models.take_out(served)
            served.give_up_streams()
        if replica.streams is not None:
            replica.streams.finish(
                CloseCode.SERVICE_RESTART, "Another version is served now, or none; open another stream."
            )
        while key in self._attached and (replica.writer.in_use or (served.is_preparing and not others)):
            await asyncio.sleep(POLL_S)
        if key in self._attached:
            self._answered_before += replica.writer.counts[ANSWERED]
            self._detach(key)
        self._drop_beams()

    def lose_engine(self, engine: int) -> None:
        """Submit the requests of an engine that is gone to others, or fail them.

        Models without another engine wait for a new table.
        """
        lost = [(key, *each) for key, each in self._attached.items() if each[1].engine == engine]
        # All of them first: the next step of a chain must not go to another table of this engine.
        for key, served, replica in lost:
            self._detach(key)
            served.lose(replica)
        for key, served, replica in lost:
            # A replica that is being retired answers what it has until its table is detached.
            others = [other for each, other in self._attached.values() if each is served]
            served.settle(replica, others, self._second_tries)
            served.resume_streams()
            if served.engine_lost:
                # A version that is being retired is not in the registry any more.
                if served in self.models:
                    self._lost[key] = served
                self._answered_before += replica.writer.counts[ANSWERED]

    def sweep(self, held_ns: int = 0) -> None:
        """End the sequences that were idle, the streams that waited, and the requests that are overdue for too long.

        Args:
            held_ns: Time since the last sweep for which the event loop did not run, so that it took no results.
        """
        now_ns = self.now_ns()
        for writer in list(self._writers):
            if overdue := writer.expire_overdue(now_ns - held_ns):
                log.warning("an engine does not answer; requests long past their deadline: %d", overdue)
        # This counts those that were given up at the last sweep, too.
        for served in list(self._served.values()):
            served.resume_streams()
        for waiting in list(self._resumptions.values()):
            waiting.expire()
        for served in self._served.values():
            if served.sequences is not None:
                served.sequences.sweep(now_ns)
        self._count_beam_restarts()

    def close_sequences(self) -> None:
        """Let no further sequence begin, and no stream wait for a new engine, before the server shuts down."""
        self._draining = True
        for waiting in self._resumptions.values():
            waiting.close()
        for served in self._served.values():
            if served.sequences is not None:
                served.sequences.close()

    def writer(self, key: int) -> TableWriter | None:
        """Return the writer of a table; None if it is not attached."""
        return self._attached[key][1].writer if key in self._attached else None

    @property
    def awaited(self) -> int:
        """Number of requests, not live streams, that wait for results."""
        return sum(writer.in_use for writer in self._writers if writer.table.chunks == 1)

    @property
    def awaited_by_all(self) -> int:
        """Number of slots that such requests of all front-ends use, also those whose results were not taken yet."""
        return sum(writer.table.in_use for writer in self._writers if writer.table.chunks == 1)

    @property
    def has_results(self) -> bool:
        """True if results wait to be handed out."""
        return any(writer.has_results for writer in self._writers)

    def collect(self) -> int:
        """Hand out the results of every table; returns their number."""
        count = 0
        for writer in self._writers:
            taken = writer.collect()
            if taken:
                writer.refresh()
                count += taken
        if count and self._resumptions:
            self._resume_later()
        return count

    def _resume_later(self) -> None:
        """Let engines go on with streams for which there was no room, now that there may be some."""
        if not any(waiting.waiting for waiting in self._resumptions.values()):
            return
        now_ns = self.now_ns()
        if now_ns - self._resumed_ns >= RESUME_EACH_NS:
            self._resumed_ns = now_ns
            for served in list(self._served.values()):
                served.resume_streams()

    def _named(
        self,
        command: LoadModel,
        manifest: Manifest,
        found: FoundApplication,
        replica: Replica,
        beam: BeamModel | None,
    ) -> ServedModel:
        application = found.application
        # It is done already, but in a server of one process.
        _import_decoders(application)
        served = ServedModel(
            name=command.name,
            version=command.version,
            label=f"{command.name}/{command.version}" if command.several else command.name,
            application=application,
            manifest=manifest,
            bundle=_bundle_of(command),
            replica=replica,
            several=len(self.wakes) > 1,
            budget_ns=self._budget_ns(application),
            idle_ns=self.idle_ns,
            now_ns=self.now_ns,
            decode_pool=self._decode_pool(command, manifest, application),
            version_headers=((VERSION_HEADER, version_hash(manifest, found)),),
            beam=beam,
        )
        mine = command.name, command.version
        for lost in self._lost.values():
            same = (lost.name, lost.version) == mine and lost.content_hash == served.content_hash
            if same and lost.sequences is not None and served.sequences is not None:
                served.sequences.adopt(lost.sequences)
        self._lost = {key: lost for key, lost in self._lost.items() if (lost.name, lost.version) != mine}
        self.models.put(served)
        return served

    def _budget_ns(self, application: Application) -> int:
        """Budget of a request that names none: up to its first output, where its answer takes steps."""
        generate = application.generate
        return self.budget_ns if generate is None else budgets_ns(generate, self.budget_ns)[0]

    def _decode_pool(self, command: LoadModel, manifest: Manifest, application: Application) -> DecodePool | None:
        decode = application.decode
        if decode is None:
            return None
        if manifest.raw is None:
            # Another `decode` may be of any kind: all but large pictures is decoded in the event loop.
            is_picture = isinstance(decode, PictureFile)
            if not is_picture and not any(kind.startswith("image/") for kind in application.accepts):
                return None
            is_quick = is_small_picture if is_picture else is_no_large_picture
            return DecodePool(command.name, decode, application.input.check, self.now_ns, is_quick)
        # Imported only here: most applications prepare nothing, and ONNX Runtime loads slowly.
        from penstock.runtime.onnx.prepare_session import PrepareSession

        prepared = PrepareSession(read_prepare(_bundle_of(command), manifest), manifest.raw, manifest.inputs[0])
        return DecodePool(command.name, decode, prepared, self.now_ns)

    def _beam(self, command: LoadModel, manifest: Manifest, application: Application) -> BeamModel | None:
        beam = None if application.live is None else application.live.beam
        if beam is None:
            return None
        key = command.model, manifest.content_hash
        if key in self._beams:
            # Its engine died: its streams go on.
            return self._beams[key]
        sha256 = manifest.files.get(LANGUAGE, "")
        if beam.language is not None and not sha256:
            log.warning("the bundle of %s has no language model; its beam runs without one", command.name)
        language = _bundle_of(command) / LANGUAGE if sha256 else None
        symbols = application.output_tensor.labels or ()
        self._beams[key] = BeamModel(self.beams, self.beams.add(symbols, beam, language, sha256), beam)
        return self._beams[key]

    def _drop_beams(self) -> None:
        """Unload the beams of models that are neither served nor wait for an engine."""
        used = {served.beam for served in (*self._served.values(), *self._lost.values())}
        for key, beam in list(self._beams.items()):
            if beam not in used:
                self.beams.remove(self._beams.pop(key).number)

    def _count_beam_restarts(self) -> None:
        """Count restarts of the beam process, whose thread writes no table, for each model that has a beam."""
        before, self._beam_restarts = self._beam_restarts, self.beams.restarts
        for served in self._served.values():
            if served.beam is not None:
                served.counts[BEAM_RESTARTS] += self._beam_restarts - before

    def _replica(
        self,
        loaded: ModelLoaded,
        application: Application,
        memory: SlotTable | int,
        beam: BeamModel | None,
        version: str,
    ) -> Replica:
        if isinstance(memory, int):
            layout = TableLayout.of(
                application, slots=loaded.slots, frontends=loaded.frontends, state_bytes=loaded.state_bytes
            )
            memory = SlotTable.attached(layout, memory)
        budget_ns = self._budget_ns(application)
        writer = TableWriter(
            memory,
            budget_ns=budget_ns,
            wake=self.wakes[loaded.engine],
            index=self.index,
            margin_ns=self.margin_ns,
        )
        streams = None
        if application.live is not None:
            streams = Streams(
                name=loaded.command.name,
                application=application,
                writer=writer,
                table=memory,
                budget_ns=budget_ns,
                batch_loop=self.batch_loop,
                now_ns=self.now_ns,
                error_of_status=lambda status, own_ns: status_error(status, budget_ns if own_ns is None else own_ns),
                quotas=self.quotas,
                resumptions=self._resumptions_of(loaded),
                replay=self.replay,
                headroom=self.headroom,
                beam=beam,
                tickets=self._tickets_of(loaded, application, application.live.rate_hz, version),
            )
        return Replica(
            engine=loaded.engine,
            device=loaded.device,
            runs_by=loaded.runs_by,
            fallback=loaded.fallback,
            writer=writer,
            table=memory,
            streams=streams,
            load_s=loaded.load_s,
            memory_bytes=loaded.memory_bytes,
            table_bytes=loaded.table_bytes,
        )

    def _tickets_of(
        self, loaded: ModelLoaded, application: Application, rate_hz: float, version: str
    ) -> StreamTickets | None:
        if self.sealer is None or not loaded.state_bytes:
            return None
        return StreamTickets(
            sealer=self.sealer,
            application=application.name,
            version_hash=version,
            precision=loaded.state_layout,
            max_bytes=max_ticket_bytes(application.input_tensor, rate_hz, loaded.state_bytes),
            interval_s=self.ticket_s,
            rate_hz=rate_hz,
        )

    def _resumptions_of(self, loaded: ModelLoaded) -> Resumptions[Member]:
        """The streams that wait for an engine with the same version of a model, of all its replicas."""
        key = loaded.command.model, loaded.bundle_hash
        there = self._resumptions.get(key)
        if there is None:
            # Those of versions that are gone.
            used = {replica.streams.waiting for _, replica in self._attached.values() if replica.streams is not None}
            self._resumptions = {
                other: waiting for other, waiting in self._resumptions.items() if waiting.waiting or waiting in used
            }
            there = self._resumptions[key] = Resumptions(self.now_ns, self.replay.wait_s if self.replay else 0.0)
            if self._draining:
                there.close()
        return there

    def _detach(self, key: int) -> None:
        served, _ = self._attached.pop(key)
        if all(other is not served for other, _ in self._attached.values()):
            self._served = {number: other for number, other in self._served.items() if other is not served}
            if served.decode_pool is not None:
                served.decode_pool.close()
        self._list_writers()

    def _list_writers(self) -> None:
        # A new list each time: the old one may be in use by an iteration.
        self._writers = [replica.writer for _, replica in self._attached.values()]


def import_application(reference: str, pinned: str) -> None:
    """Import what `Attachments.attach` needs, which may take seconds; in a thread, so that others are answered.

    Args:
        reference: The application.
        pinned: Folder of the copies of its sources, which are imported instead; empty if there are none.

    Raises:
        ApplicationError: It does not import.
    """
    application = find_application(pinned_reference(pinned) or reference).application
    if application.prepare is not None:
        importlib.import_module("penstock.runtime.onnx.prepare_session")
    _import_decoders(application)


def _import_decoders(application: Application) -> None:
    """Import what decodes the application's bodies, for which its first client would wait."""
    if application.decode is not None and any(kind.startswith("image/") for kind in application.accepts):
        import_decoders()


def version_hash(manifest: Manifest, found: FoundApplication) -> str:
    """Hash of the weights and of the sources that answer, as 16 hexadecimal digits.

    Sources are those that were imported, which with `--accept-changed-app` are not those of the manifest.
    """
    content = json.dumps([manifest.content_hash, found.source_sha256()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _bundle_of(command: LoadModel) -> Path:
    return pinned_bundle(command.pinned, command.bundle)
