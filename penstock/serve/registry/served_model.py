"""One served model in a front-end: submitting chunks to its replicas, and the errors that its results stand for."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.application import Application, Reply, reply_of
from penstock.core.bundles.bundle import Manifest
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, TooLate
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.exchange.timing import Timing
from penstock.serve.frontend.balancer import PredictedFinish, RequestBalancer
from penstock.serve.frontend.beam_process import BeamModel
from penstock.serve.frontend.decode_pool import DecodePool
from penstock.serve.frontend.held_loop import SlowDecodes
from penstock.serve.frontend.second_tries import SecondTries
from penstock.serve.frontend.table_writer import NEVER_NS, Done, SlotHandle, TableWriter
from penstock.serve.messages import RESTART_S
from penstock.serve.moving_average import MovingAverage
from penstock.serve.registry.whole_answer import GOOD, Ends, WholeAnswer
from penstock.serve.streams.sequences import Finished, Sequences
from penstock.serve.streams.stream_balancer import StreamBalancer, resume_waiting
from penstock.serve.streams.streams import Streams
from penstock.serve.table import slots
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.lengths import LengthGrid

log = logging.getLogger(__name__)

# Weight of the newest body in the moving average of the time to decode one.
FOLLOW = 0.1
# A request with more than this share of its budget left is decoded in any case: only that can correct the average.
TRIED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replica:
    """A model in one engine.

    Args:
        engine: Index of the engine.
        device: Device that runs the network.
        runs_by: `"ONNX Runtime"` or `"torch"`.
        fallback: Why a faster way to run the network was not taken; empty if none was refused.
        writer: Submits chunks and collects results.
        table: The slot table, for the statistics.
        streams: Live streams of the replica; None if the model is not live.
        load_s: See `ModelLoaded`.
        memory_bytes: See `ModelLoaded`.
        table_bytes: See `ModelLoaded`.
    """

    engine: int
    device: str
    runs_by: str
    fallback: str
    writer: TableWriter
    table: slots.SlotTable
    streams: Streams | None
    load_s: float = 0.0
    memory_bytes: int = 0
    table_bytes: int = 0


@final
@dataclass(kw_only=True, eq=False)
class ServedModel:
    """One model behind the routes.

    Args:
        name: The name in requests.
        version: Version in the model directory; `"1"` if there is none.
        label: Name in statistics: with the version, where more than one may be served.
        application: The application.
        manifest: Manifest of the bundle.
        bundle: The bundle's folder.
        replica: Its replica in the first engine.
        several: Whether there are more engines.
        budget_ns: Latency budget of a request that names none.
        idle_ns: Time without a request after which a sequence ends.
        version_headers: The response header with the hash of the weights and sources that answer; may be empty.
        now_ns: The clock of deadlines.
        decode_pool: Makes chunks from bodies if the application prepares its inputs or decodes large pictures; None
            otherwise.
        beam: Decodes utterances again at their ends; None where the application declares no beam.

    Attributes:
        shows: Outputs that are boxes in the picture; None for others.
        replicas: Replicas that accept requests; at the end the last one that did.
        writer: Submits requests: to the only replica, or to the one that the balancer chooses.
        counts: Counts of this front-end's requests, by outcome.
        max_rows: Maximum rows of one request.
        engine_lost: Whether no engine is left; a new table comes with the next one.
        streams: Its live streams; None if it is not live.
        sequences: Streams whose chunks are single requests; None if it is not live.
        decode_ns: Usual time of the bodies that are decoded in the event loop.
        slow_decodes: Logs those that hold it for long.
    """

    name: str
    version: str
    label: str
    application: Application
    manifest: Manifest
    bundle: Path
    replica: InitVar[Replica]
    several: InitVar[bool]
    budget_ns: int
    idle_ns: InitVar[int]
    now_ns: Callable[[], int]
    decode_pool: DecodePool | None = None
    version_headers: tuple[tuple[str, str], ...] = ()
    beam: BeamModel | None = None

    def __post_init__(self, replica: Replica, several: bool, idle_ns: int) -> None:
        self.reply: Reply = reply_of(self.application)
        self.shows = self.application.shows
        self.engine_lost = False
        self.decode_ns = MovingAverage(FOLLOW)
        self.slow_decodes = SlowDecodes(self.label)
        self._output = self.application.output
        self._shape = self._output.shape
        # Shared with the balancers, and updated in place as replicas join and leave.
        self._writers: list[TableWriter] = []
        self._streams: list[Streams] = []
        self._use((replica,))
        self.writer = RequestBalancer(self._writers, self.budget_ns) if several else replica.writer
        self.streams = replica.streams
        if several and replica.streams is not None:
            self.streams = StreamBalancer(self._streams)
        self.sequences = None if self.streams is None else Sequences(self.streams, idle_ns=idle_ns)

    @property
    def content_hash(self) -> str:
        """Content hash of the bundle."""
        return self.manifest.content_hash

    @property
    def metrics(self) -> dict[str, float]:
        """Validation metrics of the bundle by name."""
        return self.manifest.metrics

    @property
    def min_compute_ns(self) -> int:
        """Shortest time of the network for one row, of any length."""
        return min(int(replica.table.min_compute_ns.min()) for replica in self.replicas)

    @property
    def further_outputs_ns(self) -> int:
        """Predicted time from the first output of an answer to its last; 0 where answers take one step."""
        table = self.replicas[0].table
        costs = GenerationCosts.published(table, LengthGrid.of(self.application.input))
        if costs is None:
            return 0
        return int(max(0.0, costs.mean_steps - 1) * costs.step_ns(int(table.in_progress[0]) + 1))

    @property
    def is_preparing(self) -> bool:
        """True while bodies are being prepared that will be submitted."""
        return self.decode_pool is not None and self.decode_pool.waiting > 0

    def add_replica(self, replica: Replica) -> None:
        """Add a replica in another engine."""
        assert isinstance(self.writer, RequestBalancer), self.name
        self._use(tuple(sorted((*self.replicas, replica), key=lambda each: each.engine)))

    def remove_replica(self, replica: Replica) -> bool:
        """Submit nothing more to a replica if there is another one; returns whether there is."""
        left = tuple(each for each in self.replicas if each is not replica)
        if left:
            self._use(left)
        return bool(left)

    def lose(self, replica: Replica) -> None:
        """Submit nothing more to a replica whose engine is gone; `settle` follows."""
        self.engine_lost = not self.remove_replica(replica)
        if replica.streams is not None:
            replica.streams.lose()

    def settle(self, replica: Replica, others: Sequence[Replica], tries: SecondTries) -> None:
        """Hand out the last results of a lost replica; submit its other requests again, or fail them.

        Args:
            replica: The replica.
            others: Replicas of this model that still answer what is submitted to them.
            tries: Submits its requests to them.
        """
        writer, status = replica.writer, slots.ENGINE_LOST if self.engine_lost else slots.ONE_ENGINE_LOST
        # What is listed in the table was whole before.
        writer.collect()
        retried = tries.settle(writer, [other.writer for other in others], status)
        self.counts[slots.RETRIED] += retried
        if retried:
            log.info("%d rows of %r were submitted again, as engine %d stopped", retried, self.label, replica.engine)
        if not self.engine_lost:
            # Its counts would be missing in the sum.
            for column, count in enumerate(writer.counts):
                self.counts[column] += count if column != slots.STREAMS_OPEN else 0

    def resume_streams(self) -> int:
        """Let engines go on with streams of others that died, as many as there is room for; returns their number."""
        count = resume_waiting(self._streams) if self._streams and not self.engine_lost else 0
        if count:
            log.info("%d live streams of %r go on in another engine", count, self.label)
        return count

    def give_up_streams(self) -> None:
        """End the streams that wait for an engine."""
        for streams in self._streams[:1]:
            streams.waiting.give_up()

    def cached_rejection(self, arrival_ns: int) -> Overloaded | None:
        """Return the error of a request with the default budget, if one with no less time was just rejected.

        Counts the request as rejected. Under overload most requests are, so this is cheaper than `submit`.
        """
        now_ns = self.now_ns()
        error = self.writer.cached_rejection(now_ns, arrival_ns + self.budget_ns - now_ns)
        if error is not None:
            self.counts[slots.OFFERED] += 1
            self.counts[slots.REFUSED] += 1
        return error

    def late_rejection(
        self, arrival_ns: int, budget_ns: int | None = None, low_priority: bool = False
    ) -> Overloaded | None:
        """Return the error of a request whose body would be decoded for an answer that is late; None otherwise.

        It is counted as offered. Under overload the queue is in the sockets, and decoding is the larger part of a
        request: without this check most of it is done for nothing.

        Args:
            arrival_ns: Arrival time of the request.
            budget_ns: Latency budget of the request, or None for the server's.
            low_priority: Whether it runs after the others.
        """
        decode_ns, budget_ns = self.decode_ns.value, budget_ns or self.budget_ns
        left_ns = arrival_ns + budget_ns - self.now_ns()
        if left_ns > budget_ns * TRIED_SHARE or self.engine_lost:
            return None
        finish_ns, waiting = self.predict(1, low_priority)
        # An idle engine always tries.
        if left_ns >= decode_ns + (finish_ns if waiting else 0):
            return None
        self.counts[slots.OFFERED] += 1
        after_ms = (budget_ns - left_ns + decode_ns) / 1e6
        return Overloaded(
            f"Its file would be decoded {after_ms:.0f} ms after it came, too late for an answer within "
            f"{budget_ns / 1e6:g} ms; come back later.",
            max(0.1, budget_ns / 1e9),
        )

    def submit(
        self,
        chunk: Array | bytes,
        done: Done,
        arrival_ns: int,
        budget_ns: int | None = None,
        low_priority: bool = False,
    ) -> SlotHandle:
        """Submit one chunk.

        Args:
            chunk: A raw input chunk, or its bytes.
            done: Called with the result, see `table_writer.SlotHandle`.
            arrival_ns: Arrival time of the request.
            budget_ns: Latency budget of the request, or None for the server's.
            low_priority: Whether it runs after the others.

        Raises:
            RequestError: It is rejected.
        """
        if self.engine_lost:
            self.reject_lost()
        return self.writer.submit(
            chunk,
            done=done,
            arrival_ns=arrival_ns,
            budget_ns=budget_ns,
            now_ns=self.now_ns(),
            low_priority=low_priority,
        )

    def submit_rows(
        self,
        chunks: Array,
        finished: Finished,
        arrival_ns: int,
        budget_ns: int | None,
        low_priority: bool = False,
        timing: Timing | None = None,
        ends: Ends | None = None,
    ) -> list[SlotHandle]:
        """Submit several chunks `[n, ...]`, which get one result `[n, ...]` or one error.

        Args:
            chunks: The chunks.
            finished: Called with the result or the error.
            arrival_ns: Arrival time of the request.
            budget_ns: Latency budget of the request, or None for the server's.
            low_priority: Whether it runs after the others.
            timing: Takes the times of the rows, unless answers take steps.
            ends: Takes why each answer ended, where answers take steps.

        Raises:
            RequestError: They are rejected.
        """
        self.reject_lost()
        writer = self.writer
        if isinstance(writer, RequestBalancer):
            left_ns = arrival_ns + (budget_ns or self.budget_ns) - self.now_ns()
            length = max(map(writer.writers[0].length_of, chunks))
            writer = writer.choose(left_ns, budget_ns, rows=len(chunks), low_priority=low_priority, length=length)
        answer = self.application.answer
        outputs = np.empty((len(chunks), *answer.shape), answer.numpy_dtype)
        left, failure = len(chunks), slots.OK
        if ends is not None and self.application.generate is not None:
            ends[:] = [""] * len(chunks)

        def finish_one(index: int, status: int, output: Array, last: bool) -> None:
            nonlocal left, failure
            left -= 1
            if status in GOOD:
                outputs[index] = output.reshape(answer.shape)
                if timing is not None and self.application.generate is None:
                    timing.add(*handles[index].writer.times_ns(handles[index]))
            else:
                failure = failure or status
            if left == 0:
                finished(self.error_of(failure, budget_ns) if failure != slots.OK else outputs)

        def done_of(index: int) -> Done:
            done = partial(finish_one, index)
            if self.application.generate is None:
                return done

            def whole_done(status: int, whole: Array, ended: str) -> None:
                if ends is not None:
                    ends[index] = ended
                done(status, whole, True)

            return WholeAnswer(self.application, whole_done)

        handles: list[SlotHandle] = []
        try:
            for index, chunk in enumerate(chunks):
                handle = writer.submit(
                    chunk,
                    done=done_of(index),
                    arrival_ns=arrival_ns,
                    budget_ns=budget_ns,
                    now_ns=self.now_ns(),
                    low_priority=low_priority,
                    whole_request=len(chunks) == 1,
                )
                handles.append(handle)
        except BaseException:
            self.cancel(handles)
            raise
        return handles

    def predict(self, rows: int, low_priority: bool, length: int = 0) -> PredictedFinish:
        """Predict the finish of a request at the best replica, see `TableWriter.predict`."""
        writers = [replica.writer for replica in self.replicas]
        if writers[0].shortest_length:
            length = max(length, writers[0].shortest_length)
        return min(PredictedFinish(*writer.predict(rows, NEVER_NS, low_priority, length)) for writer in writers)

    def length_of(self, chunk: Array) -> int:
        """Return the length of a chunk; 0 where the size is fixed."""
        return self.replicas[0].writer.length_of(chunk)

    def cancel(self, handles: list[SlotHandle]) -> None:
        """Cancel the rows of a request whose client is gone."""
        for handle in handles:
            handle.cancel()

    def unpacked(self, output: Array) -> Any:
        """Return the output of one row, given flat, as `reply` takes it: an array, or several by name."""
        spec = self._output
        return spec.unpack(output) if isinstance(spec, RecordSpec) else output.reshape(self._shape)

    def reject_lost(self) -> None:
        """Reject requests while no engine is left.

        Raises:
            Overloaded: The engine is gone.
        """
        if self.engine_lost:
            raise Overloaded("The engine stopped and is being started again; come back later.", RESTART_S)

    def total(self, column: int) -> int:
        """Sum a count over all front-ends."""
        return sum(int(replica.table.counts[:, column].sum()) for replica in self.replicas)

    def count_rejection(self, error: RequestError) -> None:
        """Count a request without a result by its error."""
        self.counts[column_of(error)] += 1

    def count_broken_reply(self) -> None:
        """Count an answered request as failed, because its reply raised."""
        self.counts[slots.ANSWERED] -= 1
        self.counts[slots.BROKEN] += 1

    def error_of(self, status: int, budget_ns: int | None) -> RequestError:
        """Make the error for the status of a result."""
        return status_error(status, self.budget_ns if budget_ns is None else budget_ns)

    def _use(self, replicas: tuple[Replica, ...]) -> None:
        self.replicas = replicas
        self._writers[:] = [replica.writer for replica in replicas]
        self._streams[:] = [replica.streams for replica in replicas if replica.streams is not None]
        self.counts = replicas[0].writer.counts
        self.max_rows = max(1, min(replica.table.layout.slots_each for replica in replicas) // 4)


def status_error(status: int, budget_ns: int) -> RequestError:
    """Make the error for the status of a result of a request with this budget."""
    if status == slots.EXPIRED:
        return TooLate(f"Deadline of {budget_ns / 1e6:g} ms exceeded; come back later.", 1.0)
    if status == slots.ENGINE_LOST:
        return Overloaded("The engine stopped before it answered and is being started again.", RESTART_S)
    if status == slots.ONE_ENGINE_LOST:
        return Overloaded("The engine that it was on stopped; send it again.", 1.0)
    if status == slots.LOST_OFTEN:
        return ComputeFailed("Several engines stopped while they ran this stream; it is not tried again.")
    if status == slots.LOST_TWICE:
        return ComputeFailed("Two engines stopped while they ran this request; it is not tried again.")
    if status == slots.FAILED:
        return ComputeFailed("The application's network failed on this input; the server's log says how.")
    return ComputeFailed("The application's network answered with NaN or infinity; this input has no answer.")


def column_of(error: RequestError) -> int:
    """Return the counter column of a request without a result, by its error."""
    if isinstance(error, TooLate):
        return slots.TOO_LATE
    if error.status in (429, 503, 504):
        return slots.REFUSED
    return slots.BROKEN if error.status >= 500 else slots.INVALID
