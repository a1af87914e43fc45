"""The calls that are open on an HTTP/2 connection, from the heads of its frames in both directions (RFC 9113, 5.1).

A call is *partial* until its client has sent all of it or the library has answered anything.
"""

import time
from collections.abc import Callable
from typing import final

FRAME_HEAD_BYTES = 9
DATA, HEADERS, RST_STREAM, GOAWAY = 0, 1, 3, 7
END_STREAM = 1
# Frames that begin or end a call, or a part of it.
_OF_CALLS = (DATA, HEADERS, RST_STREAM)
# More calls than a client can have open are not followed: the library refuses them.
MAX_CALLS = 4096


@final
class OpenCalls:
    """Follows the calls of one client.

    Args:
        now_ns: A monotonic clock.

    Attributes:
        last: Number of the newest call.
        idle_since_ns: When the last open call ended, or the connection began.
    """

    __slots__ = ("_now_ns", "_partial", "_whole", "idle_since_ns", "last")

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self.last = 0
        self.idle_since_ns = now_ns()
        # When each began, the oldest first.
        self._partial: dict[int, int] = {}
        self._whole: set[int] = set()

    @property
    def in_use(self) -> bool:
        """True if a call waits for its answer or gets it."""
        return bool(self._whole)

    @property
    def partial_since_ns(self) -> int | None:
        """Time at which the oldest partial call began; None if there is none."""
        return next(iter(self._partial.values()), None)

    @property
    def last_taken(self) -> int:
        """Number of the newest call before the oldest partial one."""
        return min(self._partial, default=self.last + 1) - 1

    def sent(self, kind: int, flags: int, call: int) -> None:
        """Take the head of a frame of the client."""
        if kind not in _OF_CALLS:
            return
        if kind == RST_STREAM:
            self._end(call)
            return
        if call > self.last and kind == HEADERS:
            self.last = call
            if len(self._partial) < MAX_CALLS:
                self._partial[call] = self._now_ns()
        if flags & END_STREAM and self._partial.pop(call, None) is not None:
            self._whole.add(call)

    def answered(self, kind: int, flags: int, call: int) -> None:
        """Take the head of a frame of the library."""
        if kind not in _OF_CALLS:
            return
        if kind == RST_STREAM or flags & END_STREAM:
            self._end(call)
        elif self._partial.pop(call, None) is not None:
            self._whole.add(call)

    def _end(self, call: int) -> None:
        self._whole.discard(call)
        self._partial.pop(call, None)
        if not self._whole and not self._partial:
            self.idle_since_ns = self._now_ns()


@final
class AnswerFrames:
    """Follows the frames that the library sends to one client.

    Args:
        calls: The client's calls.

    Attributes:
        begun: Whether any frame has come.
    """

    __slots__ = ("_calls", "_left", "_skip", "begun")

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self.begun = False
        # What is left of the current frame, and the beginning of a frame's head.
        self._skip = 0
        self._left = b""

    @property
    def at_boundary(self) -> bool:
        """True if another frame may follow here."""
        return self.begun and not self._skip and not self._left

    def feed(self, received: bytes) -> None:
        """Take the next bytes."""
        if self._left:
            received = self._left + received
        at, size, calls = self._skip, len(received), self._calls
        while at + FRAME_HEAD_BYTES <= size:
            length = received[at] << 16 | received[at + 1] << 8 | received[at + 2]
            calls.answered(received[at + 3], received[at + 4], int.from_bytes(received[at + 5 : at + 9], "big"))
            at += FRAME_HEAD_BYTES + length
            self.begun = True
        self._left = received[at:]
        self._skip = max(0, at - size)


def goaway(last_call: int) -> bytes:
    """The frame by which a client sends further calls, and those after the last one, over another connection."""
    payload = last_call.to_bytes(4, "big") + bytes(4)
    return len(payload).to_bytes(3, "big") + bytes((GOAWAY, 0)) + bytes(4) + payload
