"""Connections that wait at a socket whose process does not accept them; the test calls the timers."""

import select
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.serve.http import neglected_queues
from penstock.serve.http.neglected_queues import LOOK_S, NeglectedQueues


class Timers:
    """The timers of a loop."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        assert seconds == LOOK_S
        self.waiting.append(call)
        return SimpleNamespace(cancel=lambda: self.waiting.remove(call))

    def look(self) -> None:
        """Let the time of a look pass."""
        (call,) = self.waiting
        self.waiting.clear()
        call()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(neglected_queues, "asyncio", SimpleNamespace(get_running_loop=lambda: timers))
    return timers


@contextmanager
def listening() -> Generator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connected(listener: socket.socket) -> socket.socket:
    client = socket.create_connection(listener.getsockname())
    assert select.select([listener], [], [], 5)[0]
    return client


def test_what_waits_at_two_looks_is_accepted(timers: Timers) -> None:
    with listening() as neglected, listening() as other:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((neglected, other), taken.append)
        with connected(neglected):
            queues.note_work()
            timers.look()
            assert not taken
            timers.look()
            assert taken == [neglected]


def test_what_the_owner_accepts_in_time_is_left_to_it(timers: Timers) -> None:
    with listening() as listener:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((listener,), taken.append)
        for _ in range(3):
            with connected(listener):
                queues.note_work()
                timers.look()
                listener.accept()[0].close()
            queues.note_work()
            timers.look()
        assert not taken


def test_it_looks_while_there_is_work_or_somebody_waits(timers: Timers) -> None:
    with listening() as listener:
        queues = NeglectedQueues((listener,), lambda listener: listener.accept()[0].close())
        queues.note_work()
        queues.note_work()
        timers.look()
        timers.look()
        assert not timers.waiting
        with connected(listener):
            queues.note_work()
            timers.look()
            # It accepts without any more work, and looks once more.
            timers.look()
            timers.look()
        assert not timers.waiting


def test_it_closes_after_a_last_call(timers: Timers) -> None:
    with listening() as listener:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((listener,), taken.append)
        queues.note_work()
        queues.close(taken.append)
        assert taken == [listener]
        assert listener.fileno() < 0
        queues.note_work()
        assert not timers.waiting
