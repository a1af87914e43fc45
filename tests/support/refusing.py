"""A server that is ready, and refuses every request or fails, at once or after a time."""

import socketserver
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.acceptance.fleet.routing_proxies import Backend


class _Refuser(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        assert isinstance(server, RefusingServer)
        with server.lock:
            server.refused += 1
        time.sleep(server.wait_s)
        self._say(server.status, server.report)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _say(self, status: int, report: str = "") -> None:
        self.send_response(status)
        if report:
            self.send_header("endpoint-load-metrics", report)
        self.send_header("Content-Length", "0")
        self.send_header("Retry-After", "1")
        self.end_headers()


class RefusingServer(ThreadingHTTPServer):
    """A server that refuses.

    Attributes:
        refused: Requests that it refused.
        status: The status of its answers.
        report: Their load report; empty for none.
        backend: Its ports.
    """

    daemon_threads = True
    # The default of 5 makes connections of many clients wait for a second.
    request_queue_size = 512

    def __init__(self, agent_port: int, wait_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Refuser)
        self.lock, self.refused, self.wait_s = threading.Lock(), 0, wait_s
        self.status, self.report = 503, ""
        self.backend = Backend(port=self.server_address[1], agent_port=agent_port)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of probes that break off."""


class _Agent(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"ready up 100%\n")


@contextmanager
def refusing_server(wait_s: float = 0.0) -> Generator[RefusingServer]:
    """Run one until the block ends, which refuses each request after so many seconds."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Agent) as agent:
        agent.daemon_threads = True
        with RefusingServer(agent.server_address[1], wait_s) as server:
            threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in (agent, server)]
            for thread in threads:
                thread.start()
            try:
                yield server
            finally:
                for each in (agent, server):
                    each.shutdown()
                for thread in threads:
                    thread.join()
