"""A lasting stream that one thread sends and another one reads, on connections that the test plays and that end."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, cast

import orjson
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.sync.client import ClientConnection

from penstock.client.kept_messages import FLUSH, Message
from penstock.client.lasting_stream import LastingConnection, Reconnect
from penstock.client.retry import Answer, ClientConfig, error_of
from penstock.core.errors import RequestError

MESSAGES, MESSAGE_BYTES = 500, 12
# Messages between two tickets, those that may be unanswered, and those that are kept.
EACH, WINDOW, KEPT = 9, 16, 40
READY: dict[str, Any] = {"type": "ready", "tickets": True}


class Connection:
    """A connection to a server that answers each message at once, with the sum since the last flush, and ends early."""

    def __init__(self, ticket: str | None, messages: int) -> None:
        self._sum, self._next = orjson.loads(ticket) if ticket else (0, 0)
        self._left = messages
        self._results: SimpleQueue[Message | None] = SimpleQueue()

    def send(self, message: Message) -> None:
        if not self._left:
            raise closed()
        number, self._next = self._next, self._next + 1
        if isinstance(message, bytes):
            assert int.from_bytes(message[:4], "little") == number, (message, number)
            self._sum += int.from_bytes(message[4:], "little")
        self._results.put(result(number, self._sum))
        if message == FLUSH:
            self._sum = 0
        if self._next % EACH == 0:
            ticket = orjson.dumps([self._sum, self._next]).decode()
            self._results.put(orjson.dumps({"type": "ticket", "seq": number, "ticket": ticket}).decode())
        self._left -= 1
        if not self._left:
            self.close_socket()

    def recv(self, timeout: float) -> Message:
        try:
            said = self._results.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if said is None:
            self.close_socket()
            raise closed()
        return said

    def close_socket(self) -> None:
        self._left = 0
        self._results.put(None)

    def close(self) -> None:
        self.close_socket()


def closed() -> ConnectionClosed:
    return ConnectionClosedError(None, None)


def result(number: int, sum: int) -> bytes:
    return number.to_bytes(4, "little") + sum.to_bytes(8, "little")


@pytest.fixture
def often() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", range(3))
def test_each_result_comes_once_where_one_thread_sends_and_one_reads(seed: int) -> None:
    lives, pauses, messages = random.Random(seed), random.Random(seed), list[Message]()
    for number in range(MESSAGES):
        samples = number.to_bytes(4, "little") + number.to_bytes(8, "little")
        messages.append(FLUSH if lives.random() < 0.1 else samples)

    def connect(ticket: str | None) -> tuple[ClientConnection, Message]:
        return cast(ClientConnection, Connection(ticket, lives.randint(1, 30))), orjson.dumps(READY).decode()

    reconnect = Reconnect(silent_s=10, kept_bytes=KEPT * MESSAGE_BYTES)
    stream = LastingConnection(connect(None)[0], READY, connect, reconnect)
    room, failures = threading.Semaphore(WINDOW), list[BaseException]()

    def send() -> None:
        try:
            for message in messages:
                assert room.acquire(timeout=10)
                stream.send(message)
        except BaseException as error:  # noqa: BLE001 - the other thread shows it
            failures.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    total = 0
    try:
        for number, message in enumerate(messages):
            if pauses.random() < 0.1:
                # What comes now is read when its connection is gone, perhaps.
                time.sleep(0.001)
            total += int.from_bytes(message[4:], "little") if isinstance(message, bytes) else 0
            assert stream.recv(10) == result(number, total), (number, failures)
            total = 0 if message == FLUSH else total
            room.release()
    finally:
        sender.join()
    assert not failures
    kept = stream._kept
    assert kept._bytes == sum(len(message) for _, message in kept._kept) <= reconnect.kept_bytes


class Attempts:
    """Opens connections. Attempts fail until it is told to accept them."""

    def __init__(self, error: Exception, failures: int = 1 << 30) -> None:
        self.error, self.left = error, failures
        self.tried, self.opened = threading.Event(), list[Connection]()

    def __call__(self, ticket: str | None) -> tuple[ClientConnection, Message]:
        self.left -= 1
        self.tried.set()
        if self.left >= 0:
            raise self.error
        self.opened.append(Connection(ticket, 100))
        return cast(ClientConnection, self.opened[-1]), orjson.dumps(READY).decode()


def request_error(status: int) -> RequestError:
    error = error_of(Answer(status, {}, b'{"error": "not now"}'), ClientConfig(url="http://server"))
    assert isinstance(error, RequestError)
    return error


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_proxy_without_a_server_and_a_quota_that_holds_the_dead_stream_are_tried_again(status: int) -> None:
    attempts = Attempts(request_error(status), 2)
    stream = LastingConnection(cast(ClientConnection, Connection(None, 1)), READY, attempts, Reconnect(for_s=10))
    stream.send(bytes(12))
    stream.send((1).to_bytes(4, "little") + bytes(8))
    assert [stream.recv(10), stream.recv(10)] == [result(0, 0), result(1, 0)]


def test_a_refusal_that_stays_ends_the_stream_at_once() -> None:
    attempts = Attempts(request_error(401))
    stream = LastingConnection(cast(ClientConnection, Connection(None, 1)), READY, attempts, Reconnect(for_s=10))
    stream.send(bytes(12))
    with pytest.raises(RequestError, match="not now"):
        stream.send((1).to_bytes(4, "little") + bytes(8))


def test_a_stream_that_is_closed_while_another_thread_reconnects_does_not_go_on() -> None:
    attempts = Attempts(request_error(503))
    stream = LastingConnection(cast(ClientConnection, Connection(None, 1)), READY, attempts, Reconnect(for_s=60))
    stream.send(bytes(12))
    ends = list[BaseException]()

    def read() -> None:
        try:
            while True:
                stream.recv()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            ends.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert attempts.tried.wait(10)
    stream.close()
    attempts.left = 0
    reader.join(10)
    assert not reader.is_alive()
    (end,) = ends
    assert isinstance(end, ConnectionClosed)
    assert end.rcvd is not None
    assert end.rcvd.reason == "The stream is closed."
    assert all(connection._left == 0 for connection in attempts.opened)
