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
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._held: list[threading.Event] = []
        self._flows = self._flowing()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for flows in self._held:
            flows.set()
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
            threads, self._threads = self._threads, []
            for flows in self._held:
                flows.set()
            for each in sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for each in sockets:
                each.close()

    def hold(self) -> None:
        """Carry nothing more on the connections that are open, and leave them open."""
        with self._lock:
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
            with self._lock:
                self.opened += 1
                self._sockets += [client, server]
                for ends in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._carry, args=(*ends, self._flows))
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, flows: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                flows.wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
