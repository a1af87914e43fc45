"""The control channel between the supervisor and a process: a socket pair that keeps packet boundaries.

A message is split into packets: one byte that says whether it is the last, then a part of the message. The first packet
carries file descriptors, so that the message that names a slot table carries its memory.
"""

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from penstock.serve.messages import HandedOver, Heartbeat, Message, decode_message, encode_message

log = logging.getLogger(__name__)

# Largest message. Texts are cut in `encode_message`, so that only the number of models makes one long.
MAX_MESSAGE_BYTES = 16 << 20
# Part of a message in one packet, far below the buffer of a socket.
PACKET_BYTES = 32 << 10
MAX_DESCRIPTORS = 4
HEARTBEAT_S = 1.0
# The kernel has no memory for a packet, or too many descriptors are under way; it says nothing when that has passed.
_NO_ROOM = {errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}
_RETRY_S = 0.01
_MORE, _LAST = b"\0", b"\1"

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
        # Packets that the socket has no room for, because the other process is stopped, say.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        # The packets of a message that is not complete yet, and its descriptors.
        self._parts = bytearray()
        self._descriptors: list[int] = []
        # Whether one of them was lost.
        self._cut_off = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._receive)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. A message to a process that is gone is dropped: `on_close` reports its end."""
        # A heartbeat that waits is worth nothing.
        if self._end.fileno() < 0 or (self._unsent and isinstance(message, Heartbeat)):
            return
        given = list(descriptors)
        for packet in packets_of(message):
            sent = not self._unsent and self._try_send(packet, given)
            if not sent and not isinstance(message, Heartbeat):
                self._keep(packet, given, droppable=isinstance(message, HandedOver))
            if self._end.fileno() < 0:
                return
            given = []

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
        _close_all(self._descriptors)
        self._descriptors, self._parts = [], bytearray()

    def _keep(self, packet: bytes, descriptors: list[int], *, droppable: bool) -> None:
        """Keep a packet until the socket has room; where that is not possible, it is dropped or the channel ends."""
        copies: list[int] = []
        try:
            copies.extend(map(os.dup, descriptors))
        except OSError as error:
            _close_all(copies)
            if droppable:
                log.warning(
                    "a client's connection is closed: its descriptor cannot be kept for another process (%s)", error
                )
                return
            log.error("a process gets no more messages and ends: a descriptor cannot be kept for it (%s)", error)
            self.close()
            return
        self._unsent.append((packet, copies))
        self._loop.add_writer(self._end, self._flush)

    def _try_send(self, packet: bytes, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._end, [packet], descriptors)
        except BlockingIOError:
            return False
        except ConnectionError:
            self.close()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return False
        return True

    def _flush(self) -> None:
        if self._end.fileno() < 0:
            return
        while self._unsent and self._try_send(*self._unsent[0]):
            # Sent, or dropped by a close.
            if self._unsent:
                _close_all(self._unsent.popleft()[1])
        if self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)
            if self._unsent:
                self._loop.call_later(_RETRY_S, self._await_room)

    def _await_room(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.add_writer(self._end, self._flush)

    def _receive(self) -> bool:
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self._end, PACKET_BYTES + 1, MAX_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionResetError:
            # It has ended without having read everything; what it sent comes after this error.
            return True
        except ConnectionError:
            packet, descriptors, flags = b"", [], 0
        for descriptor in descriptors:
            # Programs that an application starts must not keep a client's connection open; `recv_fds` takes no flags.
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        self._cut_off |= bool(flags & socket.MSG_CTRUNC)
        if not packet or len(self._parts) + len(packet) > MAX_MESSAGE_BYTES:
            return self._end_receiving()
        self._parts += packet[1:]
        if packet[:1] == _LAST:
            message, self._parts = decode_message(bytes(self._parts)), bytearray()
            if self._cut_off and not isinstance(message, HandedOver):
                log.error("a descriptor of a message was lost, because this process may open no more; its channel ends")
                return self._end_receiving()
            descriptors, self._descriptors = self._descriptors, []
            if self._cut_off:
                self._cut_off = False
                log.warning("a client's connection was lost on its way, because this process may open no more files")
                _close_all(descriptors)
            else:
                self._on_message(message, descriptors)
        return True

    def _end_receiving(self) -> bool:
        self.close()
        self._on_close()
        return False


def packets_of(message: Message) -> list[bytes]:
    """Split a message into packets of the channel."""
    data = encode_message(message)
    assert len(data) < MAX_MESSAGE_BYTES, (type(message).__name__, len(data))
    parts = [data[start : start + PACKET_BYTES] for start in range(0, len(data), PACKET_BYTES)]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


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
