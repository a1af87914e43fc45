"""For how long bytes have been there, as the kernel of this machine says."""

import select
import socket
import sys
import time

import pytest

from penstock.serve.http.request_age import UNKNOWN_NS, request_age

MS = 1_000_000
TICK_NS = int(time.clock_getres(6) * 1e9)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux'")


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


@pytest.mark.parametrize("wait_s", [0.0, 0.03, 0.2])
def test_it_is_at_most_what_it_says_and_not_much_less(wait_s: float) -> None:
    client, server = pair()
    with client, server:
        ago_ns = request_age(server)
        sent_ns = time.monotonic_ns()
        client.send(b"request")
        select.select([server], [], [])
        arrived_ns = time.monotonic_ns()
        time.sleep(wait_s)
        asked_ns = time.monotonic_ns()
        said_ns = ago_ns()
        passed_ns = time.monotonic_ns() - sent_ns
        assert said_ns >= asked_ns - arrived_ns - MS
        assert said_ns <= passed_ns + 3 * TICK_NS


def test_what_the_kernel_does_not_say_is_as_long_as_can_be() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert request_age(ours)() == UNKNOWN_NS
    client, server = pair()
    ago_ns = request_age(server)
    client.close()
    server.close()
    assert ago_ns() == UNKNOWN_NS
