"""Plain streams of one shared connection and one model, as a struct of arrays: many chunks and results at a time.

A stream is plain while each of its messages is one whole chunk as the network takes it, and its results are binary. All
else goes the complete way, through its `Session`: the stream leaves first, and may join again. Both ways give the same
answers.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidInput
from penstock.core.spec import Array
from penstock.core.streams.stream_entries import BINARY, EntryReader
from penstock.serve.frontend.row_groups import Slots
from penstock.serve.streams.session import NUMBER_BYTES, Session
from penstock.serve.streams.streams import Streams
from penstock.serve.table.slots import CHUNKS, OK, RESULTS, SOFT_DEADLINE
from penstock.serve.websocket.live_stream import LiveStream

# Fewer entries at once are cheaper one by one.
MANY = 8
FIRST_ROWS = 16
# Numbers of a result beside its values: of the head, of the message, of its frames.
_HEAD = [("id", "<u4"), ("kind", "<u4"), ("size", "<u4"), ("number", "<u4")]


@final
class PlainStreams:
    """The streams of one connection and one model.

    Args:
        streams: Those of the model.
        send: Sends entries.
    """

    def __init__(self, streams: Streams, send: Callable[[Streams, bytes], None]) -> None:
        self._streams, self._send = streams, send
        self._groups = streams.writer.groups
        self._group = self._groups.add(self._on_results)
        spec = streams.application.input_tensor
        self._check = None if spec.takes_any_bytes else spec.check_raw
        self._frame_numbers = int(np.prod(streams.application.output_tensor.shape[1:]))
        self._size, self._frames = NUMBER_BYTES + spec.nbytes, spec.shape[0]
        self._keeps = streams.replay is not None
        self._entry = np.dtype([*_HEAD, ("samples", "u1", (spec.nbytes,))])
        self._result_dtypes: dict[int, Any] = {}
        # For each stream that was opened: its id, ascending, and if it is plain: its slot, the numbers of its next
        # message and next result, its budget.
        self._count = 0
        self._ids, self._next, self._answered = (np.zeros(FIRST_ROWS, np.uint32) for _ in range(3))
        self._slot, self._budget_ns = (np.zeros(FIRST_ROWS, np.int64) for _ in range(2))
        self._plain = np.zeros(FIRST_ROWS, np.bool_)
        self._row_of_slot = np.zeros(streams.writer.table.slots, np.int64)
        self._by_id: dict[int, LiveStream] = {}

    def open(self, stream: LiveStream) -> None:
        """Note an open stream, of the largest id so far but for one that comes from another replica."""
        if self._count == self._ids.size:
            self._make_room()
        if self._count and stream.id <= self._ids[self._count - 1]:
            self._make_place(stream.id)
        else:
            self._ids[self._count], self._plain[self._count] = stream.id, False
            self._count += 1
        self._by_id[stream.id] = stream

    def close(self, stream: LiveStream) -> None:
        """Forget a stream that has left; the last one ends the use of the table."""
        del self._by_id[stream.id]

    @property
    def empty(self) -> bool:
        """True if no stream is open."""
        return not self._by_id

    def end(self) -> None:
        """Leave the table, when no stream is open."""
        self._groups.remove(self._group)

    def join(self, stream: LiveStream) -> None:
        """Have a stream's messages and results taken here, if it is plain now."""
        counts, slot = _session_of(stream).plain_counts, stream.slot
        if stream.over or counts is None or slot is None:
            return
        row = self._row_of(stream)
        self._slot[row], self._budget_ns[row], self._plain[row] = slot, stream.budget_ns, True
        self._next[row], self._answered[row] = counts
        self._row_of_slot[slot] = row
        self._groups.join(slot, self._group)
        stream.join_lane(self, counts[1])

    def update(self, stream: LiveStream) -> None:
        """Give a stream's numbers to its session."""
        row = self._row_of(stream)
        answered = int(self._answered[row])
        _session_of(stream).set_plain_counts(int(self._next[row]), answered)
        stream.count_answered(answered)

    def leave(self, stream: LiveStream) -> None:
        """Give a stream back to its session."""
        self.update(stream)
        row = self._row_of(stream)
        self._plain[row] = False
        self._groups.leave(int(self._slot[row]))
        stream.lane = None

    def take(self, entries: EntryReader, arrival_ns: int) -> int:
        """Take entries.

        Args:
            entries: Those that come next.
            arrival_ns: When it arrived.

        Returns:
            The number of entries that were taken.
        """
        message, at, size = entries.message, entries.at, self._entry.itemsize
        # Entries must not reach over the end of a message.
        end = at + entries.each - at % entries.each if entries.each % size else len(message)
        count, rows = (end - at) // size, self._count
        if count < MANY or not self._groups.in_use:
            return 0
        entries_B = np.frombuffer(message, self._entry, count, at)
        ids_B = entries_B["id"]
        rows_B = np.minimum(self._ids[:rows].searchsorted(ids_B), rows - 1)
        # An entry of another size than those before it makes the rest unreadable; nothing behind it is taken.
        good_B = (self._ids[rows_B] == ids_B) & self._plain[rows_B]
        good_B &= (entries_B["kind"] == BINARY) & (entries_B["size"] == self._size)
        good_B &= entries_B["number"] == self._next[rows_B]
        rows_B = rows_B[: _before_first_false(good_B)]
        if rows_B.size < MANY:
            return 0
        slots_B = self._slot[rows_B]
        fit_B = self._groups.first_of_each(slots_B) & self._groups.has_room(slots_B)
        taken = _before_first_false(fit_B)
        if taken < MANY:
            return 0
        rows_B, slots_B, chunks_Bb = rows_B[:taken], slots_B[:taken], entries_B["samples"][:taken]
        if self._check is not None and not self._is_valid(chunks_Bb):
            return 0
        self._next[rows_B] += 1
        self._groups.put(
            slots_B,
            chunks_Bb,
            arrival_ns=arrival_ns,
            deadline_ns_B=arrival_ns + self._budget_ns[rows_B],
            flags=SOFT_DEADLINE,
        )
        if self._keeps:
            samples, each = memoryview(message), chunks_Bb.shape[1]
            for end, stream_id in enumerate(ids_B[:taken].tolist(), 1):
                end_at = at + end * size
                self._by_id[stream_id].keep(samples[end_at - each : end_at], self._frames)
        self._streams.counts[CHUNKS] += taken
        entries.at = at + taken * size
        return taken

    def _is_valid(self, chunks_Bb: Array) -> bool:
        assert self._check is not None
        try:
            self._check(chunks_Bb.tobytes())
        except InvalidInput:
            # The complete way finds out whose it is.
            return False
        return True

    def _on_results(self, slots_B: Slots, entries_B: Slots) -> npt.NDArray[np.bool_]:
        groups = self._groups
        ok_B = groups.status[entries_B] == OK
        lengths_B = groups.output_length[entries_B] * ok_B
        rows_B = self._row_of_slot[slots_B]
        for length in np.unique(lengths_B).tolist():
            own_B = ok_B & (lengths_B == length)
            if own_B.any():
                self._send(self._streams, self._results(rows_B[own_B], groups.output[entries_B[own_B], :length]))
        self._answered[rows_B[ok_B]] += 1
        self._streams.counts[RESULTS] += int(ok_B.sum())
        return ok_B

    def _results(self, rows_B: Slots, output_BU: Array) -> bytes:
        length = output_BU.shape[1]
        dtype = self._result_dtypes.get(length)
        if dtype is None:
            fields: list[Any] = [*_HEAD, ("frames", "<u4"), ("values", "<f4", (length,))]
            dtype = self._result_dtypes[length] = np.dtype(fields)
        results_B = np.empty(rows_B.size, dtype)
        results_B["id"], results_B["number"] = self._ids[rows_B], self._answered[rows_B]
        results_B["kind"], results_B["size"] = BINARY, 2 * NUMBER_BYTES + 4 * length
        results_B["frames"] = length // self._frame_numbers
        results_B["values"] = output_BU
        return results_B.tobytes()

    def _row_of(self, stream: LiveStream) -> int:
        return int(self._ids[: self._count].searchsorted(stream.id))

    def _make_place(self, stream_id: int) -> None:
        """Put an id between those that are larger and those that are smaller; it may be there, of when it was here."""
        count = self._count
        row = int(self._ids[:count].searchsorted(stream_id))
        if self._ids[row] != stream_id:
            for column in (self._ids, self._next, self._answered, self._slot, self._budget_ns, self._plain):
                column[row + 1 : count + 1] = column[row:count]
            plain_B = np.flatnonzero(self._plain[: count + 1])
            self._row_of_slot[self._slot[plain_B]] = plain_B
            self._count += 1
        self._ids[row], self._plain[row] = stream_id, False

    def _make_room(self) -> None:
        """Drop the rows of streams that have ended, and have room for as many again."""
        there_B = np.flatnonzero(np.isin(self._ids[: self._count], np.array(list(self._by_id), np.uint32)))
        self._count = there_B.size
        rows = max(FIRST_ROWS, 2 * self._count)
        self._ids, self._next, self._answered = (
            _moved(column, there_B, rows) for column in (self._ids, self._next, self._answered)
        )
        self._slot, self._budget_ns = (_moved(column, there_B, rows) for column in (self._slot, self._budget_ns))
        self._plain = _moved(self._plain, there_B, rows)
        plain_B = np.flatnonzero(self._plain[: self._count])
        self._row_of_slot[self._slot[plain_B]] = plain_B


def _moved(column: Any, rows_B: Slots, rows: int) -> Any:
    longer = np.zeros(rows, column.dtype)
    longer[: rows_B.size] = column[rows_B]
    return longer


def _before_first_false(good_B: npt.NDArray[np.bool_]) -> int:
    return good_B.size if good_B.all() else int(good_B.argmin())


def _session_of(stream: LiveStream) -> Session:
    assert isinstance(stream.session, Session), stream
    return stream.session
