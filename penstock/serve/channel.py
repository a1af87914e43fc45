"""The control channel between the supervisor and a process: a socket pair that keeps message boundaries.

It also passes file descriptors, so that the message that names a slot table carries its memory.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from penstock.serve.messages import Heartbeat, Message, decode_message, encode_message

MAX_MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 4
HEARTBEAT_S = 1.0

OnMessage = Callable[[Message, list[int]], None]


@final
class Channel:
    """One end of the socket pair, on this process's event loop.

    Args:
        end: A `SOCK_SEQPACKET` socket.
        on_message: Called with each message and its descriptors, which the receiver then owns.
        on_close: Called once, when the other process is gone.
    """

    def __init__(self, end: socket.socket, on_message: OnMessage, on_close: Callable[[], None]) -> None:
        self._end = end
        self._on_message = on_message
        self._on_close = on_close
        end.setblocking(False)
        # Messages that the socket has no room for, because the other process is stopped, say.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._receive)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. A message to a process that is gone is dropped: `on_close` reports its end."""
        data = encode_message(message)
        assert len(data) < MAX_MESSAGE_BYTES, len(data)
        if self._end.fileno() < 0 or (not self._unsent and self._try_send(data, list(descriptors))):
            return
        # A heartbeat that waits is worth nothing.
        if not isinstance(message, Heartbeat):
            self._unsent.append((data, [os.dup(descriptor) for descriptor in descriptors]))
            self._loop.add_writer(self._end, self._flush)

    def drain(self) -> None:
        """Receive the remaining messages of a process that has ended."""
        while self._end.fileno() >= 0 and self._receive():
            pass

    def close(self) -> None:
        """Stop sending and receiving."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _try_send(self, data: bytes, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._end, [data], descriptors)
        except BlockingIOError:
            return False
        except ConnectionError:
            self.close()
        return True

    def _flush(self) -> None:
        while self._unsent and self._try_send(*self._unsent[0]):
            # Sent, or dropped by a close.
            if self._unsent:
                _close_all(self._unsent.popleft()[1])
        if not self._unsent and self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)

    def _receive(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self.close()
            self._on_close()
            return False
        self._on_message(decode_message(data), descriptors)
        return True


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends, one for the supervisor and one for the process that it starts."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def send_heartbeats(channel: Channel, end: asyncio.Event) -> None:
    """Send a heartbeat every `HEARTBEAT_S` until `end` is set."""
    while not end.is_set():
        channel.send(Heartbeat())
        with suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), HEARTBEAT_S)
