"""A slot of a live stream: chunks in as there is room, results out, for every kind of stream."""

from collections import deque
from collections.abc import Callable
from typing import final

from penstock.core.spec import Array
from penstock.serve.frontend.table_writer import Done, SlotHandle, TableWriter
from penstock.serve.streams.actions import PushChunk
from penstock.serve.table.slots import CHUNKS, FIRST, LAST, LOW_PRIORITY, OK, RESULTS, SOFT_DEADLINE


@final
class SlotFeed:
    """A slot, and the queue of chunks that wait for room in its ring.

    Args:
        writer: Puts chunks in and takes results out.
        done: Called with each result as `penstock.serve.frontend.table_writer.SlotHandle` says; may call `leave`.
        drained: Called when the last waiting chunk has entered the ring.
        low_priority: Whether its chunks have low priority.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(
        self,
        writer: TableWriter,
        done: Done,
        *,
        drained: Callable[[], None] | None = None,
        low_priority: bool = False,
    ) -> None:
        self._writer = writer
        self._push, self._counts = writer.push, writer.counts
        self._report = done
        self._drained = drained
        self._always = SOFT_DEADLINE | LOW_PRIORITY if low_priority else SOFT_DEADLINE
        self._flags = self._always | FIRST
        # Each with its arrival and its deadline.
        self._waiting: deque[tuple[PushChunk, int, int]] = deque()
        self._handle: SlotHandle | None = writer.open(self._done, low_priority=low_priority)

    @property
    def room(self) -> bool:
        """True if the ring has room for another chunk now."""
        return self._handle is not None and not self._waiting and self._writer.room(self._handle) > 0

    def put(self, chunk: PushChunk, arrival_ns: int, deadline_ns: int) -> bool:
        """Put the next chunk in, or queue it until there is room; drop it after `leave`.

        Args:
            chunk: The chunk.
            arrival_ns: When it arrived.
            deadline_ns: When it must be answered; it is answered later too.

        Returns:
            False if it was queued.
        """
        handle = self._handle
        if handle is None:
            return True
        if not self._waiting and self._push(
            handle,
            chunk.samples,
            deadline_ns=deadline_ns,
            arrival_ns=arrival_ns,
            flags=self._flags | LAST if chunk.last else self._flags,
            length=chunk.frames,
        ):
            self._flags = self._always
            self._counts[CHUNKS] += 1
            return True
        self._waiting.append((chunk, arrival_ns, deadline_ns))
        return False

    def leave(self) -> None:
        """End the stream: nothing more comes, and the slot is free once the engine has released it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._waiting.clear()
            self._writer.cancel(handle)

    def _done(self, status: int, output: Array, last: bool) -> None:
        if status == OK:
            self._counts[RESULTS] += 1
        self._report(status, output, last)
        if self._waiting:
            self._refill()

    def _refill(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            if not self.put(*waiting.popleft()):
                self._waiting.extend(waiting)
                return
        if self._drained is not None:
            self._drained()
