"""Live streams of which each chunk is a request of its own: the Open Inference Protocol's sequences.

A sequence belongs to its id, not to a connection: whoever knows the id continues it, from wherever. It begins with the
request that says so, and ends with the one that says so, or by itself once nothing came for long. Its requests are
answered in the order in which they came, each with what came of its chunk; the last one with all that was held back.
docs/reference/sequences.md is the same for people.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from penstock.core.errors import InvalidInput, Overloaded, RequestError
from penstock.core.spec import Array, TensorSpec
from penstock.serve.feed import Chunk, Feed
from penstock.serve.slots import OK
from penstock.serve.spread import SpreadStreams
from penstock.serve.streams import Streams

# U frames of an output

# Requests of one sequence that may wait for their answers: no fewer than one gRPC stream may have.
MOST_WAITING = 256

Finished = Callable[[Array | RequestError], None]
# Whose key the client has, and what the client calls the sequence: 7 and "7" are two, and so are two clients' 7.
Key = tuple[str, int | str]


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place in the sequence that it belongs to.

    Args:
        id: The client's name of the sequence, not 0 and not empty.
        start: Whether the sequence begins with it.
        end: Whether the sequence ends with it.
    """

    id: int | str
    start: bool
    end: bool


@final
class Sequences:
    """The sequences of one model in one front-end.

    Args:
        streams: The model's live streams, of which each sequence is one.
        idle_ns: For so long nothing may come of a sequence before it ends by itself.

    Attributes:
        frame: What one frame of a chunk looks like.
        most_frames: Frames of the longest chunk.
    """

    def __init__(self, streams: Streams | SpreadStreams, *, idle_ns: int) -> None:
        spec = streams.application.input
        self.idle_ns = idle_ns
        self.frame = frame_of(spec)
        self.most_frames = spec.shape[0]
        self._streams = streams
        # Those that have not ended.
        self._open: dict[Key, _Sequence] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self,
        place: Place,
        chunk: Array,
        finished: Finished,
        *,
        owner: str = "",
        budget_ns: int | None = None,
        background: bool = False,
    ) -> Callable[[], None]:
        """Put in a request's chunk.

        Args:
            place: Of which sequence it is.
            chunk: Its frames, `[frames, ...]`; none only with the end.
            finished: Called once with the output `[1, U, ...]` or why there is none.
            owner: Whose key the client has.
            budget_ns: The latency budget that the request names.
            background: Whether a sequence that begins with it is of the second class.

        Returns:
            What says that nobody waits for the answer any more. The chunk stays in: the sequence goes on.

        Raises:
            InvalidInput: No such sequence is open, or the chunk is empty.
            Overloaded: No further sequence can be carried, or too many requests of this one wait.
            DeadlineImpossible: Nobody can have that budget.
        """
        streams, key = self._streams, (owner, place.id)
        # First of all: a batch may be run here, and its results handed out.
        arrival_ns = streams.arrived(streams.now_ns())
        budget_ns = budget_ns or streams.budget_ns
        if not len(chunk) and not place.end:
            raise InvalidInput(f"The chunk has no frames; send 1 to {self.most_frames:,}, or none with sequence_end.")
        streams.refuse_impossible(budget_ns)
        sequence = self._begun(key, budget_ns, background) if place.start else self._found(key)
        if place.end:
            del self._open[key]
        return sequence.put(Chunk(chunk.tobytes(), len(chunk), place.end, arrival_ns, budget_ns), finished)

    def sweep(self, now_ns: int) -> None:
        """End the sequences of which nothing came for too long, and whose requests are all answered."""
        for sequence in list(self._open.values()):
            if not sequence.waiting and now_ns - sequence.heard_ns > self.idle_ns:
                sequence.end(None)

    def close(self) -> None:
        """The server is going down: no sequence begins any more."""
        self._closed = True

    def _begun(self, key: Key, budget_ns: int, background: bool) -> "_Sequence":
        if self._closed:
            raise Overloaded("The server is going down; ask another one.", 5.0)
        streams, forget = self._streams, partial(self._forget, key)
        # A longer budget than the server's is no reason to make the others later.
        budget_ns = min(budget_ns, streams.budget_ns)
        # Whoever is told so may start it too, before anything else is done.
        while (before := self._open.get(key)) is not None:
            # Who is refused keeps the sequence that there is.
            streams.refuse_replacement(before, budget_ns, busy=before.waiting > 0)
            before.end(InvalidInput(f"{_named(key)} was started anew before this request was answered."))
        sequence = streams.take_in(lambda taking: _Sequence(taking, forget, background=background), budget_ns)
        self._open[key] = sequence
        return sequence

    def _found(self, key: Key) -> "_Sequence":
        sequence = self._open.get(key)
        if sequence is None:
            raise InvalidInput(
                f"{_named(key)} was not started or ended by itself after {self.idle_ns / 1e9:g} s of silence; send "
                f"sequence_start: clients must specify the START flag on the first request of the sequence."
            )
        if sequence.waiting >= MOST_WAITING:
            raise Overloaded(f"{sequence.waiting} requests of {_named(key)} wait; send more as answers come.")
        return sequence

    def _forget(self, key: Key, sequence: "_Sequence") -> None:
        if self._open.get(key) is sequence:
            del self._open[key]


@final
class _Sequence:
    """One sequence.

    Args:
        streams: Those of its model.
        forget: Called with it when it is over.
        background: Whether it is of the second class.

    Attributes:
        heard_ns: When its last request came or was answered.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams, forget: Callable[["_Sequence"], None], *, background: bool) -> None:
        self.heard_ns = 0
        self._streams = streams
        self._forget = forget
        self._frame = streams.application.output.shape[1:]
        # Of each unanswered request, who waits for the answer; and what came that has no request yet.
        self._waiting: deque[_Waiting] = deque()
        self._parts: list[Array] = []
        self._ended = self._finishing = False
        self._feed = Feed(streams, self._done, background=background)

    @property
    def waiting(self) -> int:
        """How many of its requests wait for their answers."""
        return len(self._waiting)

    def put(self, chunk: Chunk, finished: Finished) -> Callable[[], None]:
        """Put a request's chunk in; gives what says that nobody waits for its answer any more."""
        self.heard_ns = chunk.arrival_ns
        self._ended = chunk.last
        waiting = _Waiting(finished, chunk.budget_ns)
        self._waiting.append(waiting)
        self._feed.put(chunk)
        return waiting.leave

    def end(self, error: RequestError | None) -> None:
        """It is over before its end: whoever waits gets the error."""
        self._over(broken=True)
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            assert error is not None, each
            each.finished(error)

    def finish(self, code: int, reason: str) -> None:
        """`Member`'s."""
        self._finishing = True
        if not self._waiting:
            self.end(None)

    def _done(self, status: int, output: Array, last: bool) -> None:
        if status != OK:
            budget_ns = self._waiting[0].budget_ns if self._waiting else None
            self.end(self._streams.why(status, budget_ns))
            return
        # A network may have more to say than it was given chunks; that goes with the next answer. The end's comes last.
        if not last and len(self._waiting) <= self._ended:
            self._parts.append(output.copy())
            return
        parts, self._parts = [*self._parts, output], []
        self.heard_ns = self._streams.now_ns()
        whole = np.concatenate(parts) if len(parts) > 1 else output
        self._waiting.popleft().finished(whole.reshape(1, -1, *self._frame))
        if last:
            self._over(broken=False)
        elif self._finishing and not self._waiting:
            self.end(None)

    def _over(self, *, broken: bool) -> None:
        self._feed.leave()
        self._streams.left(self, broken=broken)
        self._forget(self)


@dataclass(slots=True)
class _Waiting:
    finished: Finished
    budget_ns: int

    def leave(self) -> None:
        self.finished = _nobody


def frame_of(spec: TensorSpec) -> TensorSpec:
    """One frame of a chunk of a live signal."""
    shape = spec.shape[1:]
    return replace(spec, shape=shape, labels=spec.labels if shape else ())


def _nobody(result: Array | RequestError) -> None:
    pass


def _named(key: Key) -> str:
    return f"Sequence {key[1]!r}"
