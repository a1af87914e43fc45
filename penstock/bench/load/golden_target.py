"""Requests and expected answers of a load: the golden examples of a bundle."""

import io
import json
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from penstock.bench.load.record_answers import record_answers
from penstock.bench.load.sender import Target
from penstock.client.binary_tensors import HEAD_LENGTH, request_body
from penstock.core.bundle import BundleFiles, read_bundle
from penstock.core.errors import BenchError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

JSON = "application/json"
RAW = "application/octet-stream"
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
        body: Format of an example: `"raw"` bytes, a `"json"` array, or a `"png"`; the answer is raw bytes. Several
            tensors are sent as binary tensors of the Open Inference Protocol or as JSON by name, and so answered.

    Raises:
        BenchError: The server serves another bundle, or the body cannot carry the input.
    """
    app = served_application(url)
    files = read_bundle(bundle)
    if app["bundle"] != files.manifest.content_hash:
        raise BenchError(f"{url} serves another bundle than {bundle}; name the one it was started with.")
    place = urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    spec, output = files.manifest.input, files.manifest.output
    record = None
    if isinstance(spec, RecordSpec) or isinstance(output, RecordSpec):
        if body not in ("raw", "json"):
            raise BenchError(f"{spec.describe()} cannot be sent as {body!r}; choose raw or json.")
        accept = RAW if body == "json" and not isinstance(output, RecordSpec) else JSON
        if accept == JSON:
            record = record_answers(files.golden, spec, output, "json" if body == "json" else "binary")
        if accept == JSON and body == "json":
            _check_reply(url, app["name"], files)
        requests = tuple(
            _record_request(host, port, app["name"], chunk, spec, body, accept) for chunk in files.golden.inputs
        )
    else:
        requests = tuple(
            request_bytes(host, port, f"/v1/apps/{app['name']}", *_encoded(chunk, body, files))
            for chunk in files.golden.inputs
        )
    return Target(
        host=host,
        port=port,
        requests=requests,
        answers=files.golden.outputs,
        tolerance=files.manifest.tolerance,
        record=record,
    )


def request_bytes(
    host: str, port: int, path: str, content: bytes, content_type: str, headers: str = "", accept: str = RAW
) -> bytes:
    """Return a POST request; `headers` are more lines of its head, each ended by CRLF."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {content_type}\r\n"
        f"Accept: {accept}\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


def _record_request(host: str, port: int, name: str, chunk: Array, spec: ChunkSpec, body: str, accept: str) -> bytes:
    arrays = spec.unpack(chunk) if isinstance(spec, RecordSpec) else {spec.name: chunk}
    if body == "json":
        return request_bytes(host, port, f"/v1/apps/{name}", _json(chunk, spec), JSON, accept=accept)
    content, head_length = request_body({name: array[None] for name, array in arrays.items()})
    return request_bytes(host, port, f"/v2/models/{name}/infer", content, RAW, f"{HEAD_LENGTH}: {head_length}\r\n")


def _json(chunk: Array, spec: ChunkSpec) -> bytes:
    return json.dumps(spec.to_numbers(chunk) if isinstance(spec, RecordSpec) else chunk.tolist()).encode()


def _check_reply(url: str, name: str, files: BundleFiles) -> None:
    """Refuse a reply of the application's own, which is not the output."""
    spec = files.manifest.input
    call = Request(f"{url.rstrip('/')}/v1/apps/{name}", _json(files.golden.inputs[0], spec), {"Content-Type": JSON})
    try:
        with urlopen(call, timeout=10) as answer:
            reply = json.loads(answer.read())
    except (URLError, OSError, ValueError) as error:
        raise BenchError(f"{url} does not answer the first golden example as JSON ({error}).") from None
    missing = [spec.name for spec in files.manifest.outputs if not isinstance(reply, dict) or spec.name not in reply]
    if missing:
        raise BenchError(
            f"{name!r} has a reply of its own, without {missing[0]!r}, which cannot be compared; use --body raw."
        )


def _encoded(chunk: Array, body: str, files: BundleFiles) -> tuple[bytes, str]:
    if body == "raw":
        return chunk.tobytes(), RAW
    if body == "json":
        return json.dumps(chunk.tolist()).encode(), JSON
    if body != "png" or chunk.dtype != "uint8" or chunk.ndim not in (2, 3):
        raise BenchError(f"{files.manifest.input.describe()} cannot be sent as {body!r}; choose one of {BODIES}.")
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(chunk).save(sink, "PNG")
    return sink.getvalue(), "image/png"
