"""What the supervisor and its processes say to each other, and how it is carried.

Only to start, change and end things: no request passes here. Between two processes lies a pair of sockets that keeps
messages apart and can carry file descriptors, so that the memory of a slot table goes with the word that names it.
"""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import final, get_args

from penstock.serve.models import ModelState

MOST_BYTES = 1 << 17
MOST_DESCRIPTORS = 4
# How often a process says that its loop turns.
ALIVE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """To an engine: make a model ready.

    Args:
        key: Names its table in all processes, for as long as the server runs.
        model: Names what it is a replica of: the same for the tables of one version of a model, one of each engine.
        name: What requests call it; empty takes the application's own.
        version: Of the model directory.
        bundle: Its folder.
    """

    key: int
    model: int
    name: str
    version: str
    bundle: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """From an engine, and on to the front-ends: a model is ready. Its table's memory comes along.

    Args:
        order: What was asked, with its name filled in.
        engine: Which engine it was.
        device: Where that runs networks.
        slots: Of the table.
        frontends: That share it.
        bundle_hash: The content of what was loaded.
        application: Where the application was found.
    """

    order: Order
    engine: int
    device: str
    slots: int
    frontends: int
    bundle_hash: str
    application: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """What was asked for a key, or by a token, could not be done. The status is HTTP's, for a client that asked."""

    key: int
    error: str
    status: int = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What was asked for a key, or by a token, is done."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unload:
    """To an engine: forget a model."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """To a front-end: put nothing more into a table, and say `Retired` when nobody waits for it any more."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    """From a front-end: nobody waits for a table any more."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """From a process that was just started: it cannot do its work, and ends."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lose:
    """To a front-end: an engine is gone, with all its tables."""

    engine: int


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """To a front-end: what the repository holds."""

    models: tuple[ModelState, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """To a front-end: take connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """To a front-end: take the connections of another one too, which is gone. Its listening socket comes along."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StandBack:
    """To a front-end: the other one is there again."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """To a front-end: answer what was accepted, then end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """From a front-end: a client asks to load or to unload a model. The answer carries the token as its key."""

    token: int
    name: str
    unload: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """To the supervisor: this process's loop still turns."""


Message = (
    Order
    | Loaded
    | Failed
    | Done
    | Unload
    | Retire
    | Retired
    | Unfit
    | Lose
    | States
    | Listen
    | StandIn
    | StandBack
    | Drain
    | Change
    | Alive
)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encoded(message: Message) -> bytes:
    """A message as bytes."""
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def decoded(data: bytes) -> Message:
    """The message that `encoded` made bytes of."""
    kind, fields = json.loads(data)
    if kind == "Loaded":
        fields["order"] = Order(**fields["order"])
    if kind == "States":
        fields["models"] = tuple(ModelState(**each) for each in fields["models"])
    return _KINDS[kind](**fields)


Received = Callable[[Message, list[int]], None]


@final
class Channel:
    """One end of the pair, on this process's event loop.

    Args:
        end: A `SOCK_SEQPACKET` socket.
        received: Called with each message and the descriptors that came with it, which are then the receiver's.
        closed: Called once, when the other process is gone.
    """

    def __init__(self, end: socket.socket, received: Received, closed: Callable[[], None]) -> None:
        self._end = end
        self._received = received
        self._closed = closed
        end.setblocking(False)
        # What the other process has not made room for yet, because it was stopped, say.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._readable)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; one to a process that is gone is dropped, since its end will be noticed."""
        data = encoded(message)
        assert len(data) < MOST_BYTES, len(data)
        if self._end.fileno() < 0 or (not self._unsent and self._sent(data, list(descriptors))):
            return
        # A sign of life that waited would be none.
        if not isinstance(message, Alive):
            self._unsent.append((data, [os.dup(descriptor) for descriptor in descriptors]))
            self._loop.add_writer(self._end, self._writable)

    def hear_out(self) -> None:
        """Receive what a process that is gone said before."""
        while self._end.fileno() >= 0 and self._heard():
            pass

    def close(self) -> None:
        """Hear and say nothing more."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _sent(self, data: bytes, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._end, [data], descriptors)
        except BlockingIOError:
            return False
        except ConnectionError:
            self.close()
        return True

    def _writable(self) -> None:
        while self._unsent and self._sent(*self._unsent[0]):
            # Sent, or dropped by a close.
            if self._unsent:
                _close_all(self._unsent.popleft()[1])
        if not self._unsent and self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)

    def _readable(self) -> None:
        self._heard()

    def _heard(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MOST_BYTES, MOST_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self.close()
            self._closed()
            return False
        self._received(decoded(data), descriptors)
        return True


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends, one for the supervisor and one for the process that it starts."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def beat(channel: Channel) -> None:
    """Tell the supervisor again and again that this process's loop turns."""
    while True:
        channel.send(Alive())
        await asyncio.sleep(ALIVE_S)
