"""A static file host on localhost, for a look at a pack before it is deployed."""

import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import MimeTypes
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import unquote

from penstock.core.errors import PackError
from penstock.core.packs.pack import INDEX, SIGNATURE, WEB, Pack
from penstock.core.storage.verified_folder import PACK_DESCRIPTION

LOCALHOST = "127.0.0.1"
# Bounds the wait for the requests in progress when a host stops: a file that is a pipe may never end.
LAST_ANSWERS_S = 10.0
UTF8_TEXT = {".css": "css", ".html": "html", ".js": "javascript", ".mjs": "javascript", ".txt": "plain"}
# Browsers allow more than one thread only in pages that are isolated by these headers.
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
HEADERS = {
    **ISOLATED,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The app caches its files itself; a second cache in front of it would hide a new version.
    "Cache-Control": "no-cache",
}
ON_A_PHONE = """\
A phone lets a page use its camera, and work offline, only over HTTPS. Three ways to get that:
  - put the folder on any static host with HTTPS (GitHub Pages, a bucket behind a CDN, nginx with a certificate) and
    open https://HOST/web/ on the phone;
  - an Android phone on a USB cable: 'adb reverse tcp:{port} tcp:{port}', then http://localhost:{port}/web/ on it;
  - a tunnel with a certificate: 'cloudflared tunnel --url http://localhost:{port}', 'tailscale serve {port}'.
After the first visit the app no longer needs the host."""


def pack_host(pack: Pack, port: int = 0) -> "StaticHost":
    """A host of a verified pack: it serves the pack's own files and its index, nothing else."""
    names = {PACK_DESCRIPTION, SIGNATURE, *pack.files}

    def is_served(name: str) -> bool:
        parts = PurePosixPath(name).parts
        # The index is made after the pack, so the pack does not list its files.
        return name in names or (parts[:1] == (INDEX,) and ".." not in parts and "\0" not in name)

    return StaticHost(pack.folder, is_served, headers=HEADERS, port=port)


class StaticHost:
    """Serve files of a folder on localhost while the context lasts.

    Args:
        folder: The root.
        is_served: Decides by a file's path in the folder whether it is served.
        headers: Sent with every response.
        port: Any free one by default; it stays the same after a restart.

    Raises:
        PackError: On entry: the port is taken.
    """

    def __init__(
        self, folder: Path, is_served: Callable[[str], bool], *, headers: Mapping[str, str], port: int = 0
    ) -> None:
        self.folder = folder
        self.is_served = is_served
        self.headers = headers
        self.port = port
        self._server: _Server | None = None
        self._changed = threading.Condition()
        self._in_progress = 0

    @property
    def url(self) -> str:
        """Address of the folder."""
        return f"http://{LOCALHOST}:{self.port}/"

    @property
    def page(self) -> str:
        """Address of the web app."""
        return f"{self.url}{WEB}/"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to answer."""
        try:
            self._server = _Server((LOCALHOST, self.port), partial(_Handler, self))
        except OSError as error:
            raise PackError(
                f"port {self.port} is not available ({error.strerror}); choose another one with --port."
            ) from None
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stop answering, once the requests in progress are answered; `start` resumes on the same port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        with self._changed:
            self._server = None
        self.settle()

    def settle(self) -> None:
        """Wait until no request is in progress, at most `LAST_ANSWERS_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_progress == 0, LAST_ANSWERS_S)

    @contextmanager
    def answering(self, server: object) -> Generator[bool]:
        """Count a request as in progress; yield whether its server still answers."""
        with self._changed:
            answers = server is self._server
            self._in_progress += answers
        try:
            yield answers
        finally:
            with self._changed:
                self._in_progress -= answers
                self._changed.notify_all()

    def on_sent(self, path: str, size: int) -> None:
        """Called with the request path and size in bytes of each file sent."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A page that is closed during a download is no error.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, host: StaticHost, *arguments: Any) -> None:
        self._host = host
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        with self._host.answering(self.server) as answers:
            if answers:
                self._answer()
            else:
                # Read by a thread that the scheduler came to after the host had stopped.
                self.close_connection = True

    do_HEAD = do_GET

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path in ("/", f"/{WEB}"):
            self._send(HTTPStatus.FOUND, {"Location": f"/{WEB}/"}, b"")
            return
        name = path.removeprefix("/") + ("index.html" if path.endswith("/") else "")
        try:
            content = (self._host.folder / name).read_bytes() if self._host.is_served(name) else None
        except (OSError, ValueError):
            content = None
        if content is None:
            self._send(HTTPStatus.NOT_FOUND, {"Content-Type": _type_of("404.txt")}, b"This is no part of the pack.\n")
            return
        self._send(HTTPStatus.OK, {"Content-Type": _type_of(name)}, content)
        if self.command == "GET":
            self._host.on_sent(self.path, len(content))

    def _send(self, status: HTTPStatus, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        # Closed, so that a host that is stopped answers nothing more.
        common = {"Connection": "close", "Content-Length": str(len(content))}
        for header in (headers | common | dict(self._host.headers)).items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _type_of(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    if suffix in UTF8_TEXT:
        return f"text/{UTF8_TEXT[suffix]}; charset=utf-8"
    # Python's own table, which does not depend on the machine.
    return MimeTypes().guess_type(name)[0] or "application/octet-stream"
