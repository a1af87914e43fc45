"""A static host of a folder, which counts what it sends, can be killed and can come back."""

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, final

# A page with these headers may use more than one thread, and may measure its memory.
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@final
class Host:
    """Serves a folder as it is, uncompressed, on a port of its own while the context lasts.

    Args:
        folder: What is served.
        headers: Sent with every answer.
    """

    def __init__(self, folder: Path, *, headers: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.headers = headers or {}
        # Path and bytes of each file that was sent.
        self.served: list[tuple[str, int]] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Of the folder."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def page(self) -> str:
        """Of a pack's app."""
        return f"{self.url}web/"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Begin to answer, at the same port as before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        """Answer no more."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def _handler(self) -> type[SimpleHTTPRequestHandler]:
        host = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(host.folder))

            def end_headers(self) -> None:
                for header in host.headers.items():
                    self.send_header(*header)
                super().end_headers()

            def copyfile(self, source: Any, outputfile: Any) -> None:
                content = source.read()
                host.served.append((self.path, len(content)))
                outputfile.write(content)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler
