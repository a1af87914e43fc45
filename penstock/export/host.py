"""A pack on localhost, as a static host would show it: to look at it before it goes to one."""

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from penstock.core.errors import PackError
from penstock.core.pack import DESCRIPTION, INDEX, SIGNATURE, WEB, Pack

LOCALHOST = "127.0.0.1"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}
# Of a page that is isolated like this, browsers allow more than one thread.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The app keeps its files itself; a host that keeps them too would hide a new version.
    "Cache-Control": "no-cache",
}
ON_A_PHONE = """\
A phone gives a page its camera, and keeps it for later, over HTTPS alone. Three ways to that:
  - put the folder on any static host with HTTPS (GitHub Pages, a bucket behind a CDN, nginx with a certificate) and
    open https://HOST/web/ on the phone;
  - an Android phone on a USB cable: 'adb reverse tcp:{port} tcp:{port}', then http://localhost:{port}/web/ on it;
  - a tunnel that brings a certificate: 'cloudflared tunnel --url http://localhost:{port}', 'tailscale serve {port}'.
After the first visit the app needs no host any more."""


def host_of(pack: Pack, port: int = 0) -> ThreadingHTTPServer:
    """A server of a pack on localhost, which answers as soon as `serve_forever` is called.

    Args:
        pack: As `read_pack` gave it. Nothing but its own files and its index is shown.
        port: Where; any free one by default.

    Raises:
        PackError: The port is taken.
    """
    shown = {DESCRIPTION, SIGNATURE, *pack.files}

    class Handler(_Handler):
        folder = pack.folder
        names = shown

    try:
        return _Host((LOCALHOST, port), Handler)
    except OSError as error:
        raise PackError(f"port {port} is not to be had ({error.strerror}); choose another one with --port.") from None


class _Host(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A page that is left in the middle of a download is nothing to tell of.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the files of one pack."""

    folder: Path
    names: set[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the standard library's name
        """Send a file."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Say what a GET would send."""
        self._answer(body=False)

    def end_headers(self) -> None:
        """Send the headers that every answer has, and end them."""
        for header in HEADERS.items():
            self.send_header(*header)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a page asks for dozens of files."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if path in ("/", f"/{WEB}"):
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", f"/{WEB}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        name = path.removeprefix("/") + ("index.html" if path.endswith("/") else "")
        try:
            content = (self.folder / name).read_bytes() if self._is_shown(name) else None
        except OSError:
            content = None
        if content is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"This is no part of the pack.\n", body)
        else:
            self._send(HTTPStatus.OK, TYPES.get(Path(name).suffix, "application/octet-stream"), content, body)

    def _is_shown(self, name: str) -> bool:
        parts = PurePosixPath(name).parts
        # An index is made later than the pack, which does not name its files.
        return name in self.names or (parts[:1] == (INDEX,) and ".." not in parts and "\0" not in name)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
