"""A live stream's way through its slot where no socket belongs to it: chunks in as there is room, results out."""

from collections import deque
from typing import NamedTuple, final

from penstock.core.spec import Array
from penstock.serve.frontend import Done, Ticket
from penstock.serve.slots import BACKGROUND, CHUNKS, FIRST, LAST, OK, PATIENT, RESULTS
from penstock.serve.streams import Streams


class Chunk(NamedTuple):
    """A chunk of a live signal.

    Args:
        samples: Its frames, as raw little-endian bytes.
        frames: How many.
        last: Whether the signal ends with it.
        arrival_ns: When it came.
        budget_ns: How long after that it must be answered; it is answered later too.
    """

    samples: bytes | memoryview
    frames: int
    last: bool
    arrival_ns: int
    budget_ns: int


@final
class Feed:
    """A slot, and the chunks that wait for room in it.

    Args:
        streams: Those of its model.
        done: Called with each result as `penstock.serve.frontend.Ticket` says; may call `leave`.
        background: Whether its chunks run only where they delay nobody.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams, done: Done, *, background: bool = False) -> None:
        self._frontend = streams.frontend
        self._counts = streams.counts
        self._report = done
        self._always = PATIENT | BACKGROUND if background else PATIENT
        self._first = FIRST
        self._waiting: deque[Chunk] = deque()
        self._ticket: Ticket | None = self._frontend.open(self._done, background=background)

    @property
    def room(self) -> bool:
        """Whether a chunk that is put in now need not wait."""
        return self._ticket is not None and not self._waiting and self._frontend.room(self._ticket) > 0

    def put(self, chunk: Chunk) -> None:
        """Put the next chunk in, or let it wait for room; dropped where the stream is over."""
        if self.room:
            self._push(chunk)
        elif self._ticket is not None:
            self._waiting.append(chunk)

    def leave(self) -> None:
        """The stream is over: the slot is free once the engine has let go of it, and nothing more comes."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._waiting.clear()
            self._frontend.cancel(ticket)

    def _push(self, chunk: Chunk) -> None:
        assert self._ticket is not None, chunk
        flags = self._always | self._first | (LAST if chunk.last else 0)
        self._first = 0
        self._counts[CHUNKS] += 1
        self._frontend.push(
            self._ticket,
            chunk.samples,
            deadline_ns=chunk.arrival_ns + chunk.budget_ns,
            arrival_ns=chunk.arrival_ns,
            flags=flags,
            length=chunk.frames,
        )

    def _done(self, status: int, output: Array, last: bool) -> None:
        if status == OK:
            self._counts[RESULTS] += 1
        self._report(status, output, last)
        while self._waiting and self._ticket is not None and self._frontend.room(self._ticket) > 0:
            self._push(self._waiting.popleft())
