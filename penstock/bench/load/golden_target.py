"""Requests and expected answers of a load: the golden examples of a bundle."""

import io
import json
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from penstock.bench.load.sender import Target
from penstock.core.bundle import BundleFiles, read_bundle
from penstock.core.errors import BenchError
from penstock.core.spec import Array

BODIES = ("raw", "json", "png")


def served_application(url: str) -> dict[str, Any]:
    """Return a running server's description of its application.

    Raises:
        BenchError: No server answers there.
    """
    try:
        with urlopen(f"{url.rstrip('/')}/v1/apps", timeout=10) as answer:
            return json.loads(answer.read())["apps"][0]
    except (URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise BenchError(f"no penstock server answers at {url} ({error}); start one with 'penstock serve'.") from None


def golden_target(url: str, bundle: Path, body: str = "raw") -> Target:
    """Make requests to a server from the golden examples of its bundle.

    Args:
        url: The server's address.
        bundle: The bundle's folder.
        body: Format of an example: `"raw"` bytes, a `"json"` array, or a `"png"`; the answer is raw bytes.

    Raises:
        BenchError: The server serves another bundle, or the body cannot carry the input.
    """
    app = served_application(url)
    files = read_bundle(bundle)
    if app["bundle"] != files.manifest.content_hash:
        raise BenchError(f"{url} serves another bundle than {bundle}; name the one it was started with.")
    place = urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    requests = tuple(
        request_bytes(host, port, f"/v1/apps/{app['name']}", *_encoded(chunk, body, files))
        for chunk in files.golden.inputs
    )
    return Target(
        host=host, port=port, requests=requests, answers=files.golden.outputs, tolerance=files.manifest.tolerance
    )


def request_bytes(host: str, port: int, path: str, content: bytes, content_type: str, headers: str = "") -> bytes:
    """Return a POST request; `headers` are more lines of its head, each ended by CRLF."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {content_type}\r\n"
        f"Accept: application/octet-stream\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


def _encoded(chunk: Array, body: str, files: BundleFiles) -> tuple[bytes, str]:
    if body == "raw":
        return chunk.tobytes(), "application/octet-stream"
    if body == "json":
        return json.dumps(chunk.tolist()).encode(), "application/json"
    if body != "png" or chunk.dtype != "uint8" or chunk.ndim not in (2, 3):
        raise BenchError(f"{files.manifest.input.describe()} cannot be sent as {body!r}; choose one of {BODIES}.")
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(chunk).save(sink, "PNG")
    return sink.getvalue(), "image/png"
