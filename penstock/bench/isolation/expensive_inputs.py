"""Expensive inputs: what one client sends again and again.

Each is a whole connection's bytes, made by a generator here or kept as a file that `python -m tests.fuzz.expensive`
found.
"""

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOUND = Path(__file__).parent / "found"
APP, LIVE = "/v1/apps/steady", "/v1/apps/listener/stream"
INFER, PREDICT = "/v2/models/steady/infer", "/v1/models/steady:predict"
KEY = base64.b64encode(bytes(16)).decode()
# Times that one request is repeated on a connection of many.
MANY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpensiveInput:
    """One input.

    Args:
        name: Its name, `FAMILY/WHAT`.
        first: Bytes sent first on every connection.
        again: Bytes sent again and again behind them as long as the connection lasts; empty to open a new one.
        piece: Bytes of one send; 0 for all. A small number makes the server read often.
        idle: Keep the connection open and silent behind `first`.
    """

    name: str
    first: bytes
    again: bytes = b""
    piece: int = 0
    idle: bool = False


def expensive_inputs() -> list[ExpensiveInput]:
    """Return all inputs in the order of their names."""
    found = [*_heads(), *_json(), *_packed(), *_multipart(), *_chunked(), *_tensors(), *_websockets(), *_pictures()]
    return sorted([*found, *_kept()], key=lambda each: each.name)


def post(path: str, body: bytes, content_type: str = "application/json", **headers: str) -> bytes:
    """Return a whole POST request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def frame(payload: bytes, opcode: int = 2, *, final: bool = True) -> bytes:
    """Return a masked WebSocket frame; the mask is 0."""
    size = len(payload)
    length = (
        bytes([128 | size])
        if size < 126
        else b"\xfe" + size.to_bytes(2)
        if size < 1 << 16
        else b"\xff" + size.to_bytes(8)
    )
    return bytes([(128 if final else 0) | opcode]) + length + bytes(4) + payload


def _get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines]).encode() + b"\r\n\r\n"


def _upgrade() -> bytes:
    return _get(
        LIVE, "Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13"
    )


def _heads() -> Iterator[ExpensiveInput]:
    def head(what: str, request: bytes, **options: int) -> ExpensiveInput:
        return ExpensiveInput(name=f"head/{what}", first=b"", again=request, piece=options.get("piece", 0))

    yield head("pipelined-health", _get("/v2/health/live") * MANY)
    yield head("pipelined-openapi", _get("/openapi.json") * 8)
    yield head("pipelined-apps", _get("/v1/apps") * 8)
    yield head("pipelined-metrics", _get("/metrics") * 8)
    yield head("pipelined-stats", _get("/v1/stats") * 8)
    yield head("pipelined-examples", _get("/v1/apps/steady/examples") * 8)
    yield head("pipelined-page", _get("/", "Accept-Encoding: gzip") * 8)
    yield head("many-headers", _get("/v1/apps", *(f"X-{number}: 1" for number in range(60))))
    yield head("long-header", _get("/v1/apps", "X-Long: " + "a" * 6000))
    yield head("long-path", _get("/v1/apps/" + "a" * 6000))
    yield head("percent-path", _get("/v1/apps/" + "%41" * 2000))
    yield head("one-byte-pieces", _get("/v1/apps"), piece=1)
    yield ExpensiveInput(
        name="head/unfinished", first=b"GET /v1/apps HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", again=b"a", piece=1
    )
    yield ExpensiveInput(name="head/idle", first=b"GET / HTTP/1.1\r\n", idle=True)
    yield ExpensiveInput(name="head/open-and-close", first=_get("/v2/health/live", "Connection: close"))


def _json() -> Iterator[ExpensiveInput]:
    bodies = {
        "empty-lists": b"[" + b"[]," * 20_000 + b"[]]",
        "empty-objects": b"[" + b"{}," * 20_000 + b"{}]",
        "deep": b"[" * 1000 + b"]" * 1000,
        "deep-unclosed": b"[" * 60_000,
        "one-digit-numbers": b"[" + b"1," * 60_000 + b"1]",
        "long-numbers": b"[" + b"1.2345678901234567e-300," * 4_000 + b"1]",
        "huge-integer": b"[" + b"9" * 60_000 + b"]",
        "escapes": b'["' + b"\\u00e9" * 15_000 + b'"]',
        "many-names": b"{" + b",".join(b'"%d":0' % number for number in range(12_000)) + b"}",
        "same-name": b"{" + b'"inputs":[],' * 8_000 + b'"inputs":[]}',
        "whitespace": b" " * 60_000 + b"[1,2,3,4]",
        "most-rows": b'{"inputs":[' + b"[1,2,3,4]," * 63 + b"[1,2,3,4]]}",
        "too-many-rows": b'{"inputs":[' + b"[1,2,3,4]," * 6_000 + b"[1,2,3,4]]}",
        "bad-last-row": b'{"inputs":[' + b"[1,2,3,4]," * 63 + b"[1,2,3,null]]}",
    }
    for name, body in bodies.items():
        yield ExpensiveInput(name=f"json/{name}", first=b"", again=post(APP, body))
    yield ExpensiveInput(
        name="json/predict-rows",
        first=b"",
        again=post(PREDICT, b'{"instances":[' + b"[1,2,3,4]," * 63 + b"[1,2,3,4]]}"),
    )
    yield ExpensiveInput(name="json/small-pipelined", first=b"", again=post(APP, b"[1,2,3,4]") * MANY)
    yield ExpensiveInput(name="json/unfinished-body", first=post(APP, bytes(1 << 20))[: 1 << 16], idle=True)


def _packed() -> Iterator[ExpensiveInput]:
    full = 1 << 20
    bodies = {
        "empty-lists": b"[" + b"[]," * (full // 3 - 2) + b"[]]",
        "empty-objects": b"[" + b"{}," * (full // 3 - 2) + b"{}]",
        "numbers": b"[" + b"1," * (full // 2 - 2) + b"1]",
        "zeros": bytes(full),
        "past-the-limit": bytes(64 << 20),
        "deep": b"[" * (full - 1),
        "names": b"{" + b'"a":0,' * (full // 6 - 2) + b'"a":0}',
        "strings": b"[" + b'"",' * (full // 3 - 2) + b'""]',
    }
    for name, body in bodies.items():
        yield ExpensiveInput(
            name=f"gzip/{name}", first=b"", again=post(APP, gzip.compress(body, mtime=0), Content_Encoding="gzip")
        )
    yield ExpensiveInput(
        name="gzip/empty-members",
        first=b"",
        again=post(APP, gzip.compress(b"", mtime=0) * 3_000, Content_Encoding="gzip"),
    )
    yield ExpensiveInput(
        name="gzip/deflate-lists",
        first=b"",
        again=post(APP, zlib.compress(bodies["empty-lists"]), Content_Encoding="deflate"),
    )
    yield ExpensiveInput(
        name="gzip/infer-lists",
        first=b"",
        again=post(INFER, gzip.compress(bodies["empty-lists"], mtime=0), Content_Encoding="gzip"),
    )


def _multipart() -> Iterator[ExpensiveInput]:
    part = b'--x\r\nContent-Disposition: form-data; name="numbers"\r\n\r\n[1,2,3,4]\r\n'
    bodies = {
        "many-parts": part * 800 + b"--x--\r\n",
        "empty-parts": b"--x\r\n\r\n\r\n" * 6_000 + b"--x--\r\n",
        "near-boundaries": b"--x\r\n\r\n" + b"\r\n--y" * 12_000 + b"\r\n--x--\r\n",
        "many-part-headers": b"--x\r\n" + b"A: b\r\n" * 10_000 + b"\r\n1\r\n--x--\r\n",
        "no-end": b"--x\r\n" * 12_000,
    }
    for name, body in bodies.items():
        yield ExpensiveInput(
            name=f"multipart/{name}", first=b"", again=post(APP, body, "multipart/form-data; boundary=x")
        )


def _chunked() -> Iterator[ExpensiveInput]:
    start = f"POST {APP} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = f"{start}Transfer-Encoding: chunked\r\n\r\n".encode()
    yield ExpensiveInput(name="chunked/one-byte-chunks", first=head, again=b"1\r\n[\r\n" * 2_000)
    yield ExpensiveInput(name="chunked/one-byte-chunks-and-pieces", first=head, again=b"1\r\n \r\n", piece=1)
    yield ExpensiveInput(name="chunked/long-extensions", first=head, again=b"1;" + b"a" * 1_000 + b"\r\n \r\n")
    yield ExpensiveInput(
        name="chunked/whole-requests", first=b"", again=(head + b"1\r\n[\r\n8\r\n1,2,3,4]\r\n0\r\n\r\n") * MANY
    )
    yield ExpensiveInput(
        name="chunked/trailers", first=b"", again=head + b"9\r\n[1,2,3,4]\r\n0\r\n" + b"A: b\r\n" * 50 + b"\r\n"
    )


def _tensors() -> Iterator[ExpensiveInput]:
    def infer(rows: int, data: object, **more: object) -> bytes:
        tensor = {"name": "numbers", "shape": [rows, 4], "datatype": "FP32", "data": data}
        return json.dumps({"inputs": [tensor], **more}).encode()

    yield ExpensiveInput(name="infer/flat", first=b"", again=post(INFER, infer(64, [1.5] * 256)))
    yield ExpensiveInput(name="infer/nested", first=b"", again=post(INFER, infer(64, [[1.5] * 4] * 64)))
    yield ExpensiveInput(name="infer/too-many-rows", first=b"", again=post(INFER, infer(5_000, [1.5] * 20_000)))
    yield ExpensiveInput(name="infer/huge-shape", first=b"", again=post(INFER, infer(1 << 62, [1])))
    yield ExpensiveInput(
        name="infer/many-inputs", first=b"", again=post(INFER, json.dumps({"inputs": [{}] * 10_000}).encode())
    )
    yield ExpensiveInput(
        name="infer/many-outputs", first=b"", again=post(INFER, infer(1, [1] * 4, outputs=[{"name": "answer"}] * 3_000))
    )
    yield ExpensiveInput(name="infer/long-id", first=b"", again=post(INFER, infer(1, [1] * 4, id="i" * 60_000)))
    yield ExpensiveInput(
        name="infer/many-parameters",
        first=b"",
        again=post(INFER, infer(1, [1] * 4, parameters={str(n): n for n in range(6_000)})),
    )
    rows = 64
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "numbers",
                    "shape": [rows, 4],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": rows * 16},
                }
            ]
        }
    ).encode()
    body = head + np.ones((rows, 4), np.float32).tobytes()
    binary = post(INFER, body, "application/octet-stream", Inference_Header_Content_Length=str(len(head)))
    yield ExpensiveInput(name="infer/binary", first=b"", again=binary * 8)
    yield ExpensiveInput(name="raw/pipelined", first=b"", again=post(APP, bytes(16), "application/octet-stream") * MANY)
    yield ExpensiveInput(
        name="raw/background",
        first=b"",
        again=post(APP, bytes(16), "application/octet-stream", Penstock_Priority="background") * MANY,
    )
    yield ExpensiveInput(
        name="raw/tiny-budget",
        first=b"",
        again=post(APP, bytes(16), "application/octet-stream", Penstock_Latency_Ms="0.001") * MANY,
    )
    yield ExpensiveInput(name="raw/too-long", first=b"", again=post(APP, bytes(1 << 16), "application/octet-stream"))


def _websockets() -> Iterator[ExpensiveInput]:
    start = _upgrade() + frame(b'{"type":"start"}', 1)
    sound = bytes(640)
    yield ExpensiveInput(name="websocket/upgrades", first=_upgrade())
    yield ExpensiveInput(
        name="websocket/empty-continuations",
        first=start + frame(b"", 2, final=False),
        again=frame(b"", 0, final=False) * 2_000,
    )
    yield ExpensiveInput(
        name="websocket/one-byte-fragments",
        first=start + frame(b"\0", 2, final=False),
        again=frame(b"\0", 0, final=False) * 2_000,
    )
    yield ExpensiveInput(name="websocket/pings", first=start, again=frame(b"", 9) * 2_000)
    yield ExpensiveInput(name="websocket/long-pings", first=start, again=frame(bytes(125), 9) * 400)
    yield ExpensiveInput(name="websocket/pongs", first=start, again=frame(b"", 10) * 2_000)
    yield ExpensiveInput(name="websocket/one-byte-pieces", first=start, again=frame(b"", 9), piece=1)
    yield ExpensiveInput(
        name="websocket/one-frame-chunks",
        first=start + b"".join(frame(struct.pack("<I", n) + b"\0\0") for n in range(4_000)),
    )
    yield ExpensiveInput(
        name="websocket/fast-signal", first=start + b"".join(frame(struct.pack("<I", n) + sound) for n in range(400))
    )
    resampled = _upgrade() + frame(b'{"type":"start","rate_hz":383999}', 1)
    yield ExpensiveInput(
        name="websocket/resampled",
        first=resampled + b"".join(frame(struct.pack("<I", n) + bytes(4_000)) for n in range(30)),
    )
    yield ExpensiveInput(
        name="websocket/long-start", first=_upgrade() + frame(b'{"type":"start","a":[' + b"[]," * 8_000 + b"[]]}", 1)
    )
    yield ExpensiveInput(name="websocket/open-streams", first=start, idle=True)


# The beginning of a picture of 8 x 8 pixels: what follows comes between its segments or blocks.
_JPEG = bytes.fromhex("ffd8 ffc0000b080008000801011100 ffda0008010100003f00") + bytes(64)
_GIF = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x07\1\0\0;"


def _pictures() -> Iterator[ExpensiveInput]:
    for side in (64, 256, 1000):
        yield ExpensiveInput(
            name=f"picture/black-{side}",
            first=b"",
            again=post(APP, _png(side, side, bytes((side + 1) * side)), "image/png"),
        )
    noise = np.random.default_rng(0).integers(0, 256, (100, 101), np.uint8)
    noise[:, 0] = 4
    yield ExpensiveInput(
        name="picture/noise-paeth", first=b"", again=post(APP, _png(100, 100, noise.tobytes()), "image/png")
    )
    yield ExpensiveInput(
        name="picture/too-many-pixels", first=b"", again=post(APP, _png(60_000, 60_000, bytes(1 << 20)), "image/png")
    )
    yield ExpensiveInput(
        name="picture/past-its-size", first=b"", again=post(APP, _png(8, 8, bytes(8 << 20)), "image/png")
    )
    yield ExpensiveInput(
        name="picture/many-chunks",
        first=b"",
        again=post(APP, _png(8, 8, bytes(72), extra=_chunk(b"tEXt", b"a\0b") * 3_000), "image/png"),
    )
    for name, kind, body in (
        ("jpeg-segments", "image/jpeg", _JPEG[:2] + b"\xff\xe1\0\2" * 11_000 + _JPEG[2:]),
        ("jpeg-fill", "image/jpeg", _JPEG[:2] + b"\xff" * 45_000 + _JPEG[2:]),
        ("gif-blocks", "image/png", _GIF[:13] + b"!\xfe" + b"\1a" * 22_000 + b"\0" + _GIF[13:]),
        ("tags", "image/png", _png(8, 8, bytes(72), extra=_chunk(b"eXIf", _tags(3_000)))),
    ):
        yield ExpensiveInput(name=f"picture/{name}", first=b"", again=post(APP, body, kind))
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(4 << 20), 9))
    yield ExpensiveInput(
        name="picture/packed-texts", first=b"", again=post(APP, _png(8, 8, bytes(72), extra=text * 8), "image/png")
    )


def _tags(count: int) -> bytes:
    entries = b"".join(struct.pack("<HHII", 1_000 + each, 3, 10_000, 20) for each in range(count))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entries + bytes(4)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def _png(width: int, height: int, lines: bytes, extra: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")


def _kept() -> Iterator[ExpensiveInput]:
    for file in sorted(FOUND.glob("*/*")):
        kind, data = file.parent.name, file.read_bytes()
        line, _, body = data.partition(b"\n")
        name = f"found/{kind}-{file.name}"
        match kind:
            case "infer":
                length = line[1:].decode("latin-1")
                extra = {"Inference_Header_Content_Length": length} if length.isdecimal() else {}
                yield ExpensiveInput(name=name, first=b"", again=post(INFER, body, **extra))
            case "chunk":
                content_type = line[1:].decode("latin-1")
                is_text = content_type.isascii() and content_type.isprintable()
                yield ExpensiveInput(
                    name=name, first=b"", again=post(APP, body, content_type if is_text else "application/json")
                )
            case "unpack":
                yield ExpensiveInput(name=name, first=b"", again=post(APP, body, Content_Encoding="gzip"))
            case "picture":
                yield ExpensiveInput(name=name, first=b"", again=post(APP, data[1:], "image/png"))
            case "frames":
                yield ExpensiveInput(name=name, first=_upgrade() + frame(b'{"type":"start"}', 1) + data[16:])
            case _:
                raise AssertionError(f"{file}: no input is made of the target {kind}")
