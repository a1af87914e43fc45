"""The sizes of the header blocks of an HTTP/2 connection, from the heads of its frames (RFC 9113, 4.1 and 6.10).

The heads say which calls are open, too. What the frames say, and whether they may come, is the business of gRPC's
library.
"""

from typing import final

from penstock.serve.grpc.open_calls import FRAME_HEAD_BYTES, HEADERS, OpenCalls

# A client's first bytes, `PRI * HTTP/2.0` and so on; the library refuses others.
PREFACE_BYTES = 24
CONTINUATION, END_HEADERS = 9, 4
_BLOCK = (HEADERS, CONTINUATION)
# Bytes of one header block, with the heads of its frames. The library refuses calls with more than 16 KiB of metadata,
# with a status where it is whole.
MAX_BLOCK_BYTES = 1 << 15


@final
class HeaderBlocks:
    """Follows the frames that one client sends.

    Args:
        calls: The client's calls.

    Attributes:
        unfinished_bytes: Bytes of the header block that has not come whole, as its frames announce them; 0 if there is
            none.
        begun: Frames whose heads were in the last bytes.
    """

    __slots__ = ("_block_bytes", "_calls", "_ended", "_kind", "_left", "_skip", "begun", "unfinished_bytes")

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self.begun = 0
        self.unfinished_bytes = 0
        # What is left of the current frame, and the beginning of a frame's head.
        self._skip = PREFACE_BYTES
        self._left = b""
        self._kind = -1
        self._block_bytes = 0
        self._ended = True

    def feed(self, received: bytes) -> bool:
        """Take the next bytes; return whether no header block is larger than `MAX_BLOCK_BYTES`."""
        if self._left:
            received = self._left + received
        at, size, begun, calls = self._skip, len(received), 0, self._calls
        while at + FRAME_HEAD_BYTES <= size:
            length = received[at] << 16 | received[at + 1] << 8 | received[at + 2]
            kind = self._kind = received[at + 3]
            calls.sent(kind, received[at + 4], int.from_bytes(received[at + 5 : at + 9], "big"))
            if kind in _BLOCK:
                frame_bytes = FRAME_HEAD_BYTES + length
                self._block_bytes = frame_bytes + (self._block_bytes if kind == CONTINUATION else 0)
                self._ended = received[at + 4] & END_HEADERS != 0
                if self._block_bytes > MAX_BLOCK_BYTES:
                    return False
            at += FRAME_HEAD_BYTES + length
            begun += 1
        self.begun = begun
        self._left = received[at:]
        self._skip = max(0, at - size)
        whole = self._ended and not (self._skip and self._kind in _BLOCK)
        self.unfinished_bytes = 0 if whole else self._block_bytes
        return True
