"""Servers that start together do not share a port, also before one of them listens there."""

import socket
from contextlib import ExitStack, closing

import pytest

from penstock.core.errors import ServeError
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.http.server_sockets import agent_listener, listeners, with_free_ports
from penstock.serve.settings import NetworkSettings

HOST = "127.0.0.1"


def test_a_port_of_several_front_ends_is_taken_before_they_listen() -> None:
    with closing(ReservedPorts()) as first, closing(ReservedPorts()) as second, ExitStack() as opened:
        bound = [opened.enter_context(each) for each in listeners(HOST, 0, 2, first)]
        port = bound[0].getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen on {HOST}:{port} .Address already in use."):
            listeners(HOST, port, 2, second)
        first.close()
        for each in bound:
            each.close()
        for each in listeners(HOST, port, 2, second):
            each.close()


def test_a_port_that_nothing_listens_at_yet_is_taken() -> None:
    with closing(ReservedPorts()) as first, closing(ReservedPorts()) as second:
        network = with_free_ports(NetworkSettings(agent_port=0), first)
        assert network.agent_port
        with pytest.raises(ServeError, match=f"agent checks on {HOST}:{network.agent_port} .Address already in use."):
            with_free_ports(network, second)
        # The front-ends of the first one bind it.
        with agent_listener(network, network.agent_port), agent_listener(network, network.agent_port):
            pass
        first.close()
        assert with_free_ports(network, second) == network


def test_without_unix_sockets_a_port_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def refuse(family: int = socket.AF_INET, *more: int) -> socket.socket:
        if family == socket.AF_UNIX:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, *more)

    monkeypatch.setattr(socket, "socket", refuse)
    with closing(ReservedPorts()) as reserved:
        assert with_free_ports(NetworkSettings(agent_port=0), reserved).agent_port


def test_a_host_that_cannot_be_looked_up_is_refused() -> None:
    with (
        closing(ReservedPorts()) as reserved,
        pytest.raises(ServeError, match=r"cannot listen on a\.\.b:0 \(it is no name"),
    ):
        listeners("a..b", 0, 1, reserved)
