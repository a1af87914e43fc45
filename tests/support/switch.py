"""A TCP proxy for tests, whose connections can be cut, held up, and led to another server."""

import socket
import threading
from contextlib import suppress
from typing import Self, final


@final
class Switch:
    """Leads each new connection to the present target.

    Args:
        target: Host and port.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.opened = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._held: list[threading.Event] = []
        self._flows = self._flowing()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()
        for flows in self._held:
            flows.set()

    def cut(self) -> None:
        """Break all connections."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def hold(self) -> None:
        """Carry nothing more on the connections that are open, and leave them open."""
        self._flows.clear()
        self._held.append(self._flows)
        self._flows = self._flowing()

    @staticmethod
    def _flowing() -> threading.Event:
        flows = threading.Event()
        flows.set()
        return flows

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self.opened += 1
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, sink, self._flows), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, flows: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                flows.wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
