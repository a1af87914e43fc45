"""Sequences of the Open Inference Protocol: live streams whose chunks are requests.

A sequence belongs to its id, not to a connection: a request with the id continues it over any connection. Flags of
requests start and end it; an idle timeout ends it too. Requests are answered in the order of their arrival, each with
the result of its chunk, the last one with everything that was held back. docs/reference/sequences.md describes them to
users.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from penstock.core.errors import InvalidInput, Overloaded, RequestError
from penstock.core.spec import Array, TensorSpec
from penstock.serve.streams.actions import PushChunk
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.streams.stream_balancer import StreamBalancer
from penstock.serve.streams.streams import Streams
from penstock.serve.table.slots import OK

# U frames of an output

# Unanswered requests of one sequence: no fewer than one gRPC stream may have.
MAX_WAITING = 256

Finished = Callable[[Array | RequestError], None]
# Owner of the client's key, and the sequence's id: 7 and "7" differ, and so do the 7 of two clients.
Key = tuple[str, int | str]


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """A request's sequence, and its flags.

    Args:
        id: The client's id of the sequence, not 0 and not empty.
        start: Whether the request starts the sequence.
        end: Whether the request ends the sequence.
    """

    id: int | str
    start: bool
    end: bool


@final
class Sequences:
    """The sequences of one model in one front-end.

    Args:
        streams: The model's live streams; each sequence is one.
        idle_ns: Idle timeout of a sequence.

    Attributes:
        frame: Spec of one frame of a chunk.
        max_frames: Frames of the longest chunk.
    """

    def __init__(self, streams: Streams | StreamBalancer, *, idle_ns: int) -> None:
        spec = streams.application.input_tensor
        self.idle_ns = idle_ns
        self.frame = frame_of(spec)
        self.max_frames = spec.shape[0]
        self._streams = streams
        # Those that have not ended, by id.
        self._open: dict[Key, _OpenSequence] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self,
        place: SequencePlace,
        chunk: Array,
        finished: Finished,
        arrival_ns: int,
        *,
        owner: str = "",
        address: str = "",
        budget_ns: int | None = None,
        low_priority: bool = False,
    ) -> Callable[[], None]:
        """Put in a request's chunk.

        Args:
            place: The request's sequence and flags.
            chunk: Its frames, `[frames, ...]`; none only with the end.
            finished: Called once with the output `[1, U, ...]` or the error.
            arrival_ns: Arrival time of the request.
            owner: Owner of the client's key.
            address: The client's address, of a request that starts a sequence; empty if it is not known.
            budget_ns: The request's own latency budget.
            low_priority: Whether a sequence that it starts has low priority.

        Returns:
            A function that cancels the answer. The chunk stays in: the sequence goes on.

        Raises:
            InvalidInput: No such sequence is open, or the chunk is empty.
            QuotaExceeded: The client holds as many live streams as it may.
            Overloaded: The server cannot carry one more sequence, or too many requests of this one wait.
            DeadlineImpossible: The budget is shorter than the network's own time.
        """
        streams, key = self._streams, (owner, place.id)
        budget_ns = budget_ns or streams.budget_ns
        if not len(chunk) and not place.end:
            raise InvalidInput(f"The chunk has no frames; send 1 to {self.max_frames:,}, or none with sequence_end.")
        streams.reject_impossible(budget_ns)
        if place.start:
            sequence = self._started(key, budget_ns, low_priority, StreamClient(owner, address))
        else:
            sequence = self._open_sequence(key)
        if place.end:
            del self._open[key]
        return sequence.put(PushChunk(chunk.tobytes(), len(chunk), place.end), arrival_ns, budget_ns, finished)

    def sweep(self, now_ns: int) -> None:
        """End idle sequences whose requests are all answered."""
        for sequence in list(self._open.values()):
            if not sequence.waiting and not sequence.resuming and now_ns - sequence.active_ns > self.idle_ns:
                sequence.end(None)

    def adopt(self, before: "Sequences") -> None:
        """Go on with the sequences of the same model, whose last engine died; this one has none yet."""
        assert not self._open, self._open
        # The same dictionary, from which an ended one is taken by either.
        self._open = before._open

    def close(self) -> None:
        """Reject new sequences: the server is draining."""
        self._closed = True

    def _started(self, key: Key, budget_ns: int, low_priority: bool, client: StreamClient) -> "_OpenSequence":
        if self._closed:
            raise Overloaded("The server is shutting down; retry elsewhere.", 5.0)
        streams, forget = self._streams, partial(self._forget, key)
        # A budget above the server's own must not delay the other streams.
        budget_ns = min(budget_ns, streams.budget_ns)
        # Its waiting clients get the error at once, and may start it again in that call.
        while (before := self._open.get(key)) is not None:
            # A rejected start keeps the open sequence.
            streams.quotas.reject_excess(client, replaced=before.client)
            streams.reject_replacement(before, budget_ns, busy=before.waiting > 0)
            before.end(InvalidInput(f"{_label_of(key)} was started anew before this request was answered."))
        sequence = streams.admit_stream(
            lambda taking: _OpenSequence(taking, forget, client, low_priority=low_priority), budget_ns, client
        )
        self._open[key] = sequence
        return sequence

    def _open_sequence(self, key: Key) -> "_OpenSequence":
        sequence = self._open.get(key)
        if sequence is None:
            raise InvalidInput(
                f"{_label_of(key)} was not started or ended by itself after {self.idle_ns / 1e9:g} s of silence; send "
                f"sequence_start: clients must specify the START flag on the first request of the sequence."
            )
        if sequence.waiting >= MAX_WAITING:
            raise Overloaded(f"{sequence.waiting} requests of {_label_of(key)} wait; send more as answers come.")
        return sequence

    def _forget(self, key: Key, sequence: "_OpenSequence") -> None:
        if self._open.get(key) is sequence:
            del self._open[key]


@final
class _OpenSequence:
    """One sequence.

    Args:
        streams: The live streams of its model.
        forget: Called with it when it is over.
        client: The client that started it.
        low_priority: Whether it has low priority.

    Attributes:
        active_ns: When its last request came or was answered.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(
        self,
        streams: Streams,
        forget: Callable[["_OpenSequence"], None],
        client: StreamClient,
        *,
        low_priority: bool,
    ) -> None:
        self.active_ns = 0
        self.client = client
        self._streams = streams
        self._forget = forget
        self._frame = streams.application.output_tensor.shape[1:]
        # Each unanswered request; and outputs that no request waits for yet.
        self._waiting: deque[_Answerable] = deque()
        self._parts: list[Array] = []
        self._ended = self._finishing = False
        self._feed = SlotFeed(
            streams.writer, self._done, low_priority=low_priority, ring=streams.ring(), lost=self._lost
        )

    @property
    def waiting(self) -> int:
        """Number of unanswered requests."""
        return len(self._waiting)

    @property
    def resuming(self) -> bool:
        """True while it waits for an engine, or its chunks run once more in another one."""
        return self._feed.resuming

    def put(self, chunk: PushChunk, arrival_ns: int, budget_ns: int, finished: Finished) -> Callable[[], None]:
        """Put a request's chunk in; returns a function that cancels its answer."""
        self.active_ns = arrival_ns
        self._ended = chunk.last
        waiting = _Answerable(finished, budget_ns)
        self._waiting.append(waiting)
        self._feed.put(chunk, arrival_ns, arrival_ns + budget_ns)
        return waiting.leave

    def end(self, error: RequestError | None) -> None:
        """End the sequence early: every unanswered request gets the error."""
        self._over(aborted=True)
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            assert error is not None, each
            each.finished(error)

    def finish(self, code: int, reason: str) -> None:
        """End it once every request is answered."""
        self._finishing = True
        if not self._waiting:
            self.end(None)

    def resume(self, streams: Streams) -> None:
        """Go on in another replica, see `Member`."""
        before, self._streams = self._streams, streams
        # The time without an engine was no silence.
        self.active_ns = streams.now_ns()
        streams.take_over(self, self._feed, before)

    def give_up(self, status: int) -> None:
        """End with the error of a status, see `Member`."""
        budget_ns = self._waiting[0].budget_ns if self._waiting else None
        self.end(self._streams.error_of_status(status, budget_ns))

    def _lost(self, status: int) -> None:
        self._streams.wait_for_engine(self, self._feed, status)

    def _done(self, status: int, output: Array, last: bool) -> None:
        if status != OK:
            self.give_up(status)
            return
        # A network may give more results than it was given chunks. They go with the next answer, the end's with the
        # last one.
        if not last and len(self._waiting) <= self._ended:
            self._parts.append(output.copy())
            return
        parts, self._parts = [*self._parts, output], []
        self.active_ns = self._streams.now_ns()
        whole = np.concatenate(parts) if len(parts) > 1 else output
        self._waiting.popleft().finished(whole.reshape(1, -1, *self._frame))
        if last:
            self._over(aborted=False)
        elif self._finishing and not self._waiting:
            self.end(None)

    def _over(self, *, aborted: bool) -> None:
        self._feed.leave()
        self._streams.left(self, aborted=aborted)
        self._forget(self)


@dataclass(slots=True)
class _Answerable:
    finished: Finished
    budget_ns: int

    def leave(self) -> None:
        self.finished = lambda result: None


def frame_of(spec: TensorSpec) -> TensorSpec:
    """One frame of a chunk of a live signal."""
    shape = spec.shape[1:]
    return replace(spec, shape=shape, labels=spec.labels if shape else ())


def _label_of(key: Key) -> str:
    return f"Sequence {key[1]!r}"
