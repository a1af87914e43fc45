"""Requests and expected answers of a load: the golden examples of a bundle."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from penstock.bench.load.record_answers import record_answers
from penstock.bench.load.sender import Target
from penstock.client.binary_tensors import HEAD_LENGTH, request_body
from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.golden import Golden
from penstock.core.errors import BenchError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

JSON = "application/json"
RAW = "application/octet-stream"
BODIES = ("raw", "json", "png")


class Recorded(NamedTuple):
    """Examples of what a server serves.

    Args:
        content_hash: Hash of the bundle or chain.
        input: One raw input chunk.
        output: One output chunk.
        golden: The examples.
    """

    content_hash: str
    input: ChunkSpec
    output: ChunkSpec
    golden: Golden


def served_application(url: str, name: str = "", content_hash: str = "") -> dict[str, Any]:
    """Return a running server's description of its application, the first or the one of a name.

    Args:
        url: The server's address.
        name: The application; empty for the first one.
        content_hash: Of the bundle to take, where the server has it, of several.

    Raises:
        BenchError: No server answers there, or it has none of that name.
    """
    try:
        with urlopen(f"{url.rstrip('/')}/v1/apps", timeout=10) as answer:
            apps = [app for app in json.loads(answer.read())["apps"] if name in ("", app["name"])]
            return next((app for app in apps if content_hash == app["bundle"]), None) or next(iter(apps))
    except StopIteration:
        if not name:
            raise BenchError(
                f"{url} serves no model; while it starts, wait until {url.rstrip('/')}/v2/health/ready is 200."
            ) from None
        raise BenchError(f"{url} does not serve {name!r}; start the server with it.") from None
    except (URLError, OSError, ValueError, KeyError, IndexError) as error:
        reason = getattr(error, "reason", error)
        raise BenchError(f"no penstock server answers at {url} ({reason}); start one with 'penstock serve'.") from None


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
    served_application(url)
    files = read_bundle(bundle)
    manifest = files.manifest
    app = served_application(url, content_hash=manifest.content_hash)
    recorded = Recorded(manifest.content_hash, manifest.input, manifest.answer, files.golden)
    return _target(url, app, recorded, body, str(bundle))


def chain_target(url: str, chain: str, bundles: Sequence[Path], body: str = "raw") -> Target:
    """Make requests to a served chain, with the answers of the chain that is loaded in this process.

    Args:
        url: The server's address.
        chain: Reference of the chain, see `find_chain`.
        bundles: The bundles of its parts.
        body: As for `golden_target`.

    Raises:
        BenchError: The server serves another chain or other bundles, or the body cannot carry the input.
    """
    from penstock.runtime.load_chain import load_chain

    predictor = load_chain(chain, bundles)
    application = predictor.plan.application
    recorded = Recorded(predictor.content_hash, application.input, application.output, predictor.golden())
    return _target(url, served_application(url, application.name), recorded, body, chain)


def _target(url: str, app: dict[str, Any], files: Recorded, body: str, origin: str) -> Target:
    if app["bundle"] != files.content_hash:
        raise BenchError(f"{url} serves another bundle than {origin}; name the one it was started with.")
    place = urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    spec, output = files.input, files.output
    record = None
    if isinstance(spec, RecordSpec) or isinstance(output, RecordSpec):
        if body not in ("raw", "json"):
            raise BenchError(f"{spec.describe()} cannot be sent as {body!r}; choose raw or json.")
        accept = RAW if body == "json" and not isinstance(output, RecordSpec) else JSON
        if accept == JSON:
            record = record_answers(files.golden, output, "json" if body == "json" else "binary")
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
        tolerance=files.golden.tolerance,
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


def _check_reply(url: str, name: str, files: Recorded) -> None:
    """Refuse a reply of the application's own, which is not the output."""
    spec = files.input
    call = Request(f"{url.rstrip('/')}/v1/apps/{name}", _json(files.golden.inputs[0], spec), {"Content-Type": JSON})
    try:
        with urlopen(call, timeout=10) as answer:
            reply = json.loads(answer.read())
    except (URLError, OSError, ValueError) as error:
        raise BenchError(f"{url} does not answer the first golden example as JSON ({error}).") from None
    missing = [spec.name for spec in files.output.tensors if not isinstance(reply, dict) or spec.name not in reply]
    if missing:
        raise BenchError(
            f"{name!r} has a reply of its own, without {missing[0]!r}, which cannot be compared; use --body raw."
        )


def _encoded(chunk: Array, body: str, files: Recorded) -> tuple[bytes, str]:
    if body == "raw":
        return chunk.tobytes(), RAW
    if body == "json":
        return json.dumps(chunk.tolist()).encode(), JSON
    if body != "png" or chunk.dtype != "uint8" or chunk.ndim not in (2, 3):
        raise BenchError(f"{files.input.describe()} cannot be sent as {body!r}; choose one of {BODIES}.")
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(chunk).save(sink, "PNG")
    return sink.getvalue(), "image/png"
