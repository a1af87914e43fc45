"""What the supervisor and its processes say to each other, and how it is carried.

Only to start, change and end things: no request passes here. Between two processes lies a pair of sockets that keeps
messages apart and can carry file descriptors, so that the memory of a slot table goes with the word that names it.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import final

from penstock.serve.models import ModelState

MOST_BYTES = 1 << 17
MOST_DESCRIPTORS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """To the engine: make a model ready.

    Args:
        key: Names its table in all processes, for as long as the server runs.
        name: What requests call it; empty takes the application's own.
        version: Of the model directory.
        bundle: Its folder.
    """

    key: int
    name: str
    version: str
    bundle: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """From the engine, and on to the front-ends: a model is ready. Its table's memory comes along.

    Args:
        order: What was asked, with its name filled in.
        slots: Of the table.
        frontends: That share it.
        bundle_hash: The content of what was loaded.
        application: Where the application was found.
    """

    order: Order
    slots: int
    frontends: int
    bundle_hash: str
    application: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """To the supervisor: what was asked for a key, or by a token, could not be done."""

    key: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What was asked for a key, or by a token, is done."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unload:
    """To the engine: forget a model."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """To a front-end: put nothing more into a table, and say `Done` when nobody waits for it any more."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lose:
    """To a front-end: the engine is gone, with all its tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """To a front-end: what the repository holds."""

    models: tuple[ModelState, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """To a front-end: take connections."""


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


Message = Order | Loaded | Failed | Done | Unload | Retire | Lose | States | Listen | Drain | Change | Alive
_KINDS = {
    kind.__name__: kind
    for kind in (Order, Loaded, Failed, Done, Unload, Retire, Lose, States, Listen, Drain, Change, Alive)
}


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
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._readable)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; one to a process that is gone is dropped, since its end will be noticed."""
        data = encoded(message)
        assert len(data) < MOST_BYTES, len(data)
        try:
            socket.send_fds(self._end, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError, OSError):
            self.close()

    def close(self) -> None:
        """Hear and say nothing more."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._end.close()

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MOST_BYTES, MOST_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self.close()
            self._closed()
            return
        self._received(decoded(data), descriptors)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends, one for the supervisor and one for the process that it starts."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
