"""Clients in front of gRPC's library that cannot be connected to it: none keeps a descriptor or a place."""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from penstock.serve.exchange import reserved_places
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.grpc import frame_guard
from penstock.serve.grpc.frame_guard import FrameGuard
from penstock.serve.http.server_sockets import listeners
from penstock.serve.settings import LimitSettings


def run(scene: Callable[[FrameGuard, ExitStack], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a guard whose library takes connections and says nothing."""

    async def whole() -> None:
        with closing(ReservedPorts()) as reserved:
            (listener,) = listeners("127.0.0.1", 0, 1, reserved)
        with ExitStack() as opened:
            guard = FrameGuard(listener, LimitSettings(), None)
            library = opened.enter_context(socket.socket(socket.AF_UNIX))

            def listen(address: str) -> None:
                library.bind(address.removeprefix("unix:"))
                library.listen()

            guard.bind(listen)
            guard.start()
            try:
                await scene(guard, opened)
            finally:
                await guard.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def client_of(guard: FrameGuard, opened: ExitStack) -> socket.socket:
    client = opened.enter_context(socket.create_connection(guard._listener.getsockname(), timeout=10))
    client.setblocking(False)
    return client


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_client_is_closed_where_no_descriptor_is_left_for_its_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scene(guard: FrameGuard, opened: ExitStack) -> None:
        client = client_of(guard, opened)
        monkeypatch.setattr(frame_guard, "socket", SimpleNamespace(**vars(socket) | {"socket": refused}))
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""
        assert guard._open.count == 0

    run(scene)


def test_a_client_that_loses_its_place_before_it_is_connected_keeps_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserved_places, "PLACES", 1)
    monkeypatch.setattr(FrameGuard, "_has_room", lambda _: False)

    async def scene(guard: FrameGuard, opened: ExitStack) -> None:
        before = descriptors()
        clients = [client_of(guard, opened) for _ in range(20)]
        gc.disable()
        try:
            async with asyncio.timeout(20):
                for client in clients[:-1]:
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
                # Beside the 20 sockets of the clients the last one alone has some here.
                while descriptors() >= before + 20 + 5:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()

    run(scene)
