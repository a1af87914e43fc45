"""The connections of a process, as the kernel lists them."""

import os
import socket

from penstock.bench.process_usage import client_ports


def test_the_client_ports_are_those_of_accepted_connections_to_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        elsewhere = socket.create_connection(other.getsockname())
        ends = [listener.accept()[0] for _ in range(2)] + [other.accept()[0]]
        own = [client.getsockname()[1] for client in clients]
        # The third waits in the queue: no process has it.
        assert client_ports(os.getpid(), port) == set(own[:2])
        assert client_ports(os.getpid(), other.getsockname()[1]) == {elsewhere.getsockname()[1]}
        assert client_ports(1, port) == frozenset()
        clients[0].close()
        ends[0].close()
        assert client_ports(os.getpid(), port) == {own[1]}
        for each in (*clients, elsewhere, *ends):
            each.close()
