"""Golden examples of a served bundle as requests to try, with the answers that were recorded."""

import io
import wave
from base64 import b64encode
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from penstock.core.application import Application, unpacked
from penstock.core.bundles.bundle import Manifest, read_golden, read_manifest
from penstock.core.bundles.golden import Golden
from penstock.core.bundles.golden_rows import rows_by_use
from penstock.core.errors import PenstockError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.core.streams.live import is_sound
from penstock.core.subwords import Subwords
from penstock.core.texts.subword_text import SubwordText
from penstock.core.texts.text import ByteText

MAX_EXAMPLES = 8
MAX_BODY_BYTES = 1 << 20
MAX_BYTES = 1 << 22
# A larger tensor is sent as raw bytes, and a larger answer is not shown beside the server's.
MAX_NUMBERS = 1 << 12
JSON, PNG, RAW, TEXT, WAV = "application/json", "image/png", "application/octet-stream", "text/plain", "audio/wav"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestExample:
    """One request and its recorded answer.

    Args:
        content_type: Content type of the body.
        body: The body.
        outputs: The recorded outputs by name; None where they are long.
    """

    content_type: str
    body: bytes
    outputs: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """The example as JSON values, the body in base64."""
        return {"content_type": self.content_type, "body": b64encode(self.body).decode(), "outputs": self.outputs}


def examples_body(bundle: Path, manifest: Manifest, application: Application, *, answered: bool) -> bytes:
    """Return `{"examples": [...]}` for some golden examples of a bundle; none if another one is there by now.

    Args:
        bundle: The bundle's folder.
        manifest: Its manifest when it was loaded.
        application: Its application.
        answered: Whether each has its recorded answer.
    """
    try:
        now = read_manifest(bundle)
        found = _examples(read_golden(bundle, manifest), manifest, application) if _same(now, manifest) else []
    except PenstockError:
        # Served from memory, whatever became of the folder.
        found = []
    if not answered:
        found = [replace(example, outputs=None) for example in found]
    return orjson.dumps({"examples": [example.to_json() for example in found]})


def _same(now: Manifest, then: Manifest) -> bool:
    return now.content_hash == then.content_hash


def _examples(golden: Golden, manifest: Manifest, application: Application) -> list[RequestExample]:
    found: list[RequestExample] = []
    size = 0
    for row in dict.fromkeys(rows_by_use(manifest, golden)):
        content_type, body = _request(golden, row, application)
        if len(body) > min(MAX_BODY_BYTES, application.max_body_bytes) or size + len(body) > MAX_BYTES:
            continue
        size += len(body)
        size_of = golden.raws[row].shape[:2] if content_type == PNG else None
        outputs = _outputs(golden.outputs[row, ...], application, size_of)
        found.append(RequestExample(content_type=content_type, body=body, outputs=outputs))
        if len(found) == MAX_EXAMPLES:
            break
    return found


def _request(golden: Golden, row: int, application: Application) -> tuple[str, bytes]:
    given, spec = golden.inputs[row, ...], application.input
    if golden.raws and PNG in application.accepts and golden.raws[row].dtype == np.uint8:
        return PNG, _png(golden.raws[row])
    if application.live is not None:
        return (WAV, _wav(given, application.live.rate_hz)) if is_sound(spec) else (RAW, given.tobytes())
    if text := _text(given, application):
        return TEXT, text.encode()
    if isinstance(spec, RecordSpec):
        named = spec.unpack(given)
        return JSON, orjson.dumps({name: array.tolist() for name, array in named.items()})
    if given.size > MAX_NUMBERS or (spec.dtype == "uint8" and len(spec.shape) > 1):
        return RAW, given.tobytes()
    return JSON, orjson.dumps(given.tolist())


def _text(given: Array, application: Application) -> str:
    """The text of an input; empty where it has none that gives the same input again."""
    decode, spec = application.decode, application.input
    if not isinstance(decode, ByteText | SubwordText) or not isinstance(spec, RecordSpec):
        return ""
    numbers = spec.unpack(given)[decode.tensor]
    if isinstance(decode, ByteText):
        text = numbers.tobytes().decode(errors="replace")
    else:
        text = Subwords.read(decode.vocabulary).decode(numbers.tolist())
    try:
        again = decode.of_text(text)
    except PenstockError:
        return ""
    return text if np.array_equal(again, numbers) else ""


def _outputs(output: Array, application: Application, picture: tuple[int, ...] | None) -> dict[str, Any] | None:
    """The recorded outputs as the server answers with them: boxes in the pixels of the picture that is sent."""
    if application.live is not None:
        return None
    made = unpacked(application, output)
    named = made if isinstance(made, dict) else {application.output.tensors[0].name: made}
    if application.shows is not None and picture is not None:
        height, width = picture
        named = application.shows.in_picture(named, height, width, application.outputs)
    return {name: array.tolist() for name, array in named.items()} if _count(named) <= MAX_NUMBERS else None


def _count(named: dict[str, Array]) -> int:
    return sum(array.size for array in named.values())


def _png(raw: Array) -> bytes:
    # Imported here, because it takes longer than all else that a front-end starts with.
    from PIL import Image

    # Decoding turns transparent pixels black; the network ignores the alpha channel.
    opaque = raw[..., :3] if raw.ndim == 3 and raw.shape[2] == 4 else raw
    sink = io.BytesIO()
    Image.fromarray(opaque).save(sink, "PNG")
    return sink.getvalue()


def _wav(signal_T: Array, rate_hz: float) -> bytes:
    sink = io.BytesIO()
    with wave.open(sink, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(round(rate_hz))
        file.writeframes(signal_T.astype("<i2").tobytes())
    return sink.getvalue()
