"""Parsers of the server, one function each: any bytes in, and only an error of Penstock may be raised.

A target reads from its bytes what a client decides: the first line is what stands beside the body (a header, a choice
of spec), the rest is the body. Each also asserts what must hold of an answer.
"""

import gzip
import hashlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import httptools
import numpy as np
import orjson
from google.protobuf.message import DecodeError

from penstock.core.bundles.bundle import GOLDEN, MANIFEST, WEIGHTS, Manifest, _with_hash, read_bundle
from penstock.core.decode import decode_image, decode_scaled
from penstock.core.dim import Dim
from penstock.core.errors import BundleCorrupt, InvalidInput, RequestError, TooLarge
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange.budget import MAX_BUDGET_MS, budget_ns_of
from penstock.serve.exchange.form import JSON
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Response
from penstock.serve.frontend.held_loop import SlowDecodes
from penstock.serve.grpc.conversion import parse_infer as parse_infer_grpc
from penstock.serve.grpc.oip_v2_pb2 import ModelInferRequest
from penstock.serve.http.encoding import decompress, serialize
from penstock.serve.http.oip_http import HEAD_LENGTH, infer_response, parse_infer
from penstock.serve.http.plain_body import PlainTerms, chunk_of
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.oip.inference import MAX_ID_CHARACTERS, Count, frames_of, rows_of
from penstock.serve.registry.served_model import ServedModel
from tests.fuzz.reader import reader
from tests.fuzz.services import listen, realtime_, recording
from tests.fuzz.streams import frames, live, shared

MOST_BYTES = 5_000
MOST_ROWS = 16
MOST_PIXELS = 1 << 12
# A refusal is one sentence, whatever it quotes of the request.
MOST_MESSAGE = 20_000


def _spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="numbers", name="numbers")


SPECS = (
    _spec("float32", 4),
    _spec("uint8", 2, 3),
    _spec("bool", 2),
    _spec("int64", 1),
    _spec("uint64", 2),
    _spec("float16"),
    _spec("int8", 1, 1, 2),
)
_TOKENS, _BOXES = Dim("tokens", max=4), Dim("boxes", max=3, min=0)
# Two inputs of one length and one of another, which may be 0.
RECORD = RecordSpec(
    (
        TensorSpec(dtype="int64", shape=(_TOKENS,), meaning="token ids", name="ids", limits=(0, 99)),
        TensorSpec(dtype="bool", shape=(_TOKENS,), meaning="true for a token", name="mask"),
        TensorSpec(dtype="float32", shape=(_BOXES, 2), meaning="corners", name="corners"),
    )
)
SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="scores", name="scores")


def _line_and_rest(data: bytes) -> tuple[bytes, bytes]:
    line, _, rest = data.partition(b"\n")
    return line, rest


def _chosen(line: bytes) -> tuple[TensorSpec, bytes]:
    return SPECS[line[0] % len(SPECS) if line else 0], line[1:]


def _post(body: bytes, **headers: str) -> Request:
    return Request(Head("POST", "/", {name.replace("_", "-"): value for name, value in headers.items()}), body)


def _is_a_refusal(error: RequestError, most: int = MOST_MESSAGE) -> None:
    assert 400 <= error.status < 500, error
    assert len(str(error)) <= most, f"{len(str(error)):,} characters: {str(error)[:80]}"
    orjson.dumps({"error": str(error)})


def infer(data: bytes) -> None:
    """`parse_infer`. The line: which spec, then the text of the JSON head's length, if any."""
    spec, request = _inferred(data)
    _infers(request, spec, rows_of, 1)


def sequence(data: bytes) -> None:
    """`parse_infer` of a live signal's chunk. The line: which spec a frame has, then as for `infer`."""
    frame, request = _inferred(data)
    _infers(request, frame, frames_of, 0)


def _inferred(data: bytes) -> tuple[TensorSpec, Request]:
    line, body = _line_and_rest(data)
    spec, length = _chosen(line)
    return spec, _post(body, **({HEAD_LENGTH.replace("-", "_"): length.decode("latin-1")} if length else {}))


def _infers(request: Request, spec: TensorSpec, count: Count, least_rows: int) -> None:
    try:
        found = parse_infer(request, spec, SCORES, MOST_ROWS, count)
    except RequestError as error:
        _is_a_refusal(error, 1_000)
        return
    rows = len(found.chunks)
    assert least_rows <= rows <= MOST_ROWS
    assert found.batched or rows == 1 or count is frames_of
    _is_of(spec, found.chunks)
    assert found.budget_ns is None or 0 < found.budget_ns <= MAX_BUDGET_MS * 1_000_000
    assert found.place is None or (found.place.id and len(str(found.place.id)) <= MAX_ID_CHARACTERS)
    outputs = np.zeros((1 if count is frames_of else rows, 3), np.float32)
    response = infer_response(found, outputs, "app", "1", SCORES)
    assert response.status == 200
    binary = dict(response.headers).get("Inference-Header-Content-Length")
    head = orjson.loads(response.body[: int(binary)] if binary else response.body)
    assert [tensor["name"] for tensor in head["outputs"]] == [*found.wanted]
    assert head.get("id") == found.id


def _is_of(spec: TensorSpec, chunks_B: Array) -> None:
    assert chunks_B.dtype == spec.numpy_dtype, chunks_B.dtype
    assert chunks_B.shape[1:] == spec.shape, chunks_B.shape
    assert not spec.takes_nan or bool(np.isfinite(chunks_B).all())
    assert spec.dtype != "bool" or set(chunks_B.tobytes()) <= {0, 1}


def records(data: bytes) -> None:
    """Several tensors of varying length. The line: `json`, `grpc`, or the text of the JSON head's length, if any."""
    line, body = _line_and_rest(data)
    try:
        if line == b"json":
            chunks_B = _plain_record(body)[None]
        elif line == b"grpc":
            chunks_B = parse_infer_grpc(ModelInferRequest.FromString(body), RECORD, SCORES, MOST_ROWS).chunks
        else:
            head = {HEAD_LENGTH.replace("-", "_"): line.decode("latin-1")} if line else {}
            chunks_B = parse_infer(_post(body, **head), RECORD, SCORES, MOST_ROWS).chunks
    except DecodeError:
        return
    except RequestError as error:
        _is_a_refusal(error)
        return
    assert 1 <= len(chunks_B) <= MOST_ROWS
    assert chunks_B.dtype == RECORD.numpy_dtype
    RECORD.check_numbers(chunks_B)
    for record in chunks_B:
        named = RECORD.unpack(record)
        assert RECORD.from_numbers(RECORD.to_numbers(record)).tobytes() == record.tobytes()
        assert all(np.count_nonzero(record[name]) == np.count_nonzero(array) for name, array in named.items()), (
            "padding"
        )


def _plain_record(body: bytes) -> Array:
    application = SimpleNamespace(name="app", input=RECORD, accepts=(), decode=None)
    served = cast(ServedModel, SimpleNamespace(name="app", application=application))
    record = chunk_of(served, JSON, body)
    assert not isinstance(record, bytes)
    # Another reading of the same body.
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    assert sorted(name for name, _ in pairs) == sorted(RECORD.by_name), "a name is there twice"
    for name, value in pairs:
        found = RECORD.unpack(record)[name]
        assert np.array_equal(found, np.array(value, found.dtype).reshape(found.shape)), name
    return record


def _picture(body: bytes, content_type: str) -> Array:
    return decode_image(body, mode="L", size=(2, 3), max_pixels=MOST_PIXELS)


def chunk(data: bytes) -> None:
    """`chunk_of` and `infer`'s headers. The line: which spec, then the Content-Type."""
    line, body = _line_and_rest(data)
    spec, content_type = _chosen(line)
    takes_pictures = spec.dtype == "uint8"
    application = SimpleNamespace(
        name="app",
        input=spec,
        output=spec,
        accepts=("image/png",) if takes_pictures else (),
        decode=_picture if takes_pictures else None,
        generate=None,
    )
    model = SimpleNamespace(
        name="app", application=application, now_ns=time.monotonic_ns, slow_decodes=SlowDecodes("app")
    )
    served = cast(ServedModel, model)
    try:
        terms = PlainTerms.of(served.application, _post(b"", content_type=content_type.decode("latin-1")).head)
        found = chunk_of(served, terms.content_type, body)
    except RequestError as error:
        _is_a_refusal(error)
        if _is_plainly_right(spec, content_type, body):
            raise AssertionError(f"{error!r} of what is right") from error
        return
    if isinstance(found, bytes):
        assert len(found) == spec.nbytes
        found = np.frombuffer(found, spec.numpy_dtype).reshape(spec.shape)
    _is_of(spec, found[None])


def _is_plainly_right(spec: TensorSpec, content_type: bytes, body: bytes) -> bool:
    # Another reading of the same body, simpler and slower: json's and NumPy's.
    if content_type != b"application/json":
        return False
    try:
        array = np.array(json.loads(body.decode(), parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return False
    if array.dtype.kind not in "iu" or array.shape != spec.shape or not spec.shape:
        return False
    limits = (0, 1) if spec.dtype == "bool" else (-2048, 2048) if spec.takes_nan else _limits(spec)
    return bool((array >= limits[0]).all() and (array <= limits[1]).all())


def _limits(spec: TensorSpec) -> tuple[int, int]:
    return int(np.iinfo(spec.numpy_dtype).min), int(np.iinfo(spec.numpy_dtype).max)


def _no_constant(text: str) -> float:
    raise ValueError(text)


def unpack(data: bytes) -> None:
    """`decompress`. The line: the Content-Encoding. The result must be that of another decoder."""
    line, body = _line_and_rest(data)
    encoding = line.decode("latin-1")
    try:
        plain_body = decompress(body, encoding, MOST_BYTES)
    except RequestError as error:
        _is_a_refusal(error)
    else:
        assert len(plain_body) <= MOST_BYTES or encoding == "identity"
        if encoding.lower() in ("gzip", "deflate"):
            reference = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else zlib.decompress(body)
            assert plain_body == reference, "another reader gives another body"
    for packed in (gzip.compress(body, mtime=0), zlib.compress(body)):
        if len(body) <= MOST_BYTES:
            assert decompress(packed, "gzip", MOST_BYTES) == body


def respond(data: bytes) -> None:
    """`serialize`. The line: the client's Accept-Encoding; the rest is the body. A client's parser reads it back."""
    line, body = _line_and_rest(data)
    accepts = line.decode("latin-1")
    for method in ("GET", "HEAD"):
        request = Request(Head(method, "/", {"accept-encoding": accepts}), b"")
        head, _, sent = serialize(Response(200, body), request, ResponseDate().line, close=True).partition(b"\r\n\r\n")
        if method == "HEAD":
            assert sent == b""
            continue
        client = _Client()
        client.parser.feed_data(head + b"\r\n\r\n" + sent)
        assert client.complete
        encoding = client.headers.get(b"content-encoding")
        assert zlib.decompress(sent, wbits=47) == body if encoding else sent == body
        refused = {entry.split(";")[0].strip() for entry in accepts.lower().split(",") if _is_refused(entry)}
        assert encoding is None or encoding.decode() not in refused, f"{encoding} was refused by {accepts!r}"


def _is_refused(entry: str) -> bool:
    return entry.replace(" ", "").partition(";")[2] in ("q=0", "q=0.0", "q=0.00", "q=0.000")


class _Client:
    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_message_complete(self) -> None:
        self.complete = True


def budget(data: bytes) -> None:
    """`budget_ns_of`: the bytes are the header's text."""
    try:
        budget_ns = budget_ns_of(data.decode("latin-1"))
    except InvalidInput as error:
        _is_a_refusal(error)
        return
    assert isinstance(budget_ns, int)
    assert 0 <= budget_ns <= MAX_BUDGET_MS * 1_000_000


def picture(data: bytes) -> None:
    """`decode_image`, also at a fraction of the size. The first byte chooses mode, size and fraction."""
    choice, body = data[0] if data else 0, data[1:]
    mode: Literal["RGB", "L"] = "L" if choice & 1 else "RGB"
    size = (None, (28, 28), (1, 300))[(choice >> 1) % 3]
    try:
        at_least = (8, 8) if choice & 64 else None
        pixels = decode_scaled(body, mode=mode, size=size, max_pixels=MOST_PIXELS, at_least=at_least)
    except (InvalidInput, TooLarge) as error:
        _is_a_refusal(error)
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == (3 if mode == "RGB" else 2)
    assert pixels.shape[:2] == size if size else 0 < pixels.shape[0] * pixels.shape[1] <= MOST_PIXELS


def numbers(data: bytes) -> None:
    """`from_numbers`, `from_rows` and `from_bytes` of every spec. Accepted values must round-trip."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    for spec in SPECS:
        for rows in (None, 1, 2):
            _comes_back(spec, partial(spec.from_rows, rows=rows) if rows else spec.from_numbers, found)
        _comes_back(spec, spec.from_bytes, data)


def _comes_back(spec: TensorSpec, read: Callable[[Any], Array], found: object) -> None:
    try:
        array = read(found)
    except InvalidInput as error:
        _is_a_refusal(error)
        return
    chunks = array.reshape(-1, *spec.shape)
    _is_of(spec, chunks)
    for one in chunks:
        assert spec.from_bytes(one.tobytes()).tobytes() == one.tobytes()
        back = spec.from_numbers(orjson.loads(orjson.dumps(one.tolist())))
        assert back.tobytes() == one.tobytes() or np.array_equal(back, one)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="penstock-fuzz-")


def _read_back(manifest: bytes, golden: bytes) -> None:
    folder = Path(_folder().name)
    for name, content in ((MANIFEST, manifest), (GOLDEN, golden), (WEIGHTS, b"")):
        (folder / name).write_bytes(content)
    try:
        files = read_bundle(folder)
    except BundleCorrupt:
        return
    found = files.manifest
    assert Manifest.from_json(json.loads(json.dumps(found.to_json()))).content_hash == found.content_hash
    examples = files.golden
    assert len(examples.inputs) == len(examples.outputs) > 0, "no golden example shows that the answers are the same"
    assert examples.inputs[0].shape == found.input.shape
    assert examples.outputs[0].shape == found.output.shape


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(data: bytes) -> None:
    """A manifest as it is, and, where it is JSON, sealed, so that its fields are read."""
    golden = b""
    _read_back(data, golden)
    try:
        fields = json.loads(data)
        sealed = _with_hash({**fields, "files": {**fields["files"], GOLDEN: _sha256(golden), WEIGHTS: _sha256(b"")}})
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    _read_back(sealed, golden)


def golden(data: bytes) -> None:
    """A file of golden examples under a manifest that names it. The first byte chooses the specs."""
    choice, content = data[0] if data else 0, data[1:]
    fields = Manifest(
        name="app",
        reference="",
        sources={},
        inputs=(SPECS[choice % len(SPECS)],),
        outputs=(SPECS[choice // len(SPECS) % len(SPECS)],),
        files={GOLDEN: _sha256(content), WEIGHTS: _sha256(b"")},
        tolerance=0.0,
        metrics={},
        versions={},
        parameters=0,
    ).to_json()
    _read_back(_with_hash(fields), content)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "reader": reader,
    "infer": infer,
    "sequence": sequence,
    "records": records,
    "chunk": chunk,
    "unpack": unpack,
    "respond": respond,
    "budget": budget,
    "picture": picture,
    "numbers": numbers,
    "manifest": manifest,
    "golden": golden,
    "frames": frames,
    "live": live,
    "shared": shared,
    "listen": listen,
    "realtime": realtime_,
    "recording": recording,
}
