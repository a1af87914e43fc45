"""Processor time of a front-end for a JPEG photograph, by part, and for a whole request at a real server.

python -m benchmarks.jpeg_requests [--quality 75] [--seconds 5] [--parts]

Crops of scikit-image's photographs of 500 x 375 pixels, made 224 x 224 in two ways: resized by `decode` with Pillow, or
by a `prepare` in ONNX Runtime. The network is next to none. Every answer is compared with that of `penstock.load`. One
front-end process answers; its processor time is that of the kernel's account. Lines of JSON are printed.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from benchmarks.acceptance.train.photographs import photographs
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.golden_target import request_bytes
from penstock.bench.load.sender import Target
from penstock.bench.measurement import make_measurement
from penstock.bench.server_process import running_server
from penstock.core.application import Application
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from penstock.runtime.onnx.prepare_session import open_prepare

HERE = Path(__file__).parent / "models"
MODELS = ("sized_photo", "prepared_photo")
COUNT, ROUNDS, CONNECTIONS = 24, 9, 8
JPEG, RAW = "image/jpeg", "application/octet-stream"
TOLERANCE = 1e-5


def bodies_of(quality: int, count: int = COUNT) -> list[bytes]:
    """Photographs of 500 x 375 pixels as JPEG files of a quality."""
    found: list[bytes] = []
    for _, content in photographs(count):
        sink = io.BytesIO()
        Image.open(io.BytesIO(content)).save(sink, "JPEG", quality=quality)
        found.append(sink.getvalue())
    return found


def write_bundle(model: str, folder: Path, bodies: Sequence[bytes]) -> Bundle:
    """Write the bundle of a model, with photographs as golden examples."""
    found = find_application(str(HERE / f"{model}.py"))
    decode = found.application.decode
    assert decode is not None
    raws = [decode(body, JPEG) for body in bodies[:4]]
    return Bundle.write(found, found.model(), raws if found.application.prepare else np.stack(raws), to=folder)


def jpeg_target(url: str, bundle: Path, application: Application, bodies: Sequence[bytes], kind: str) -> Target:
    """Make requests of JPEG bodies, or of the raw bytes of the same inputs, with the answers of `penstock.load`."""
    predictor, place = load(bundle), urlsplit(url)
    decode = application.decode
    assert decode is not None
    decoded = [decode(body, JPEG) for body in bodies]
    chunks = np.stack([predictor.prepare(raw) for raw in decoded] if application.prepare else decoded)
    sent = [chunk.tobytes() for chunk in chunks] if kind == RAW else bodies
    host, port = place.hostname or "127.0.0.1", place.port or 80
    requests = tuple(request_bytes(host, port, f"/v1/apps/{application.name}", body, kind) for body in sent)
    return Target(host=host, port=port, requests=requests, answers=predictor.predict(chunks), tolerance=TOLERANCE)


def parts_of(bundle: Bundle, application: Application, bodies: Sequence[bytes]) -> dict[str, Callable[[bytes], Any]]:
    """The parts of a front-end's work for one body, by name."""
    decode, prepare = application.decode, open_prepare(bundle.files)
    assert decode is not None
    raw = decode(bodies[0], JPEG)
    chunk = raw if prepare is None else prepare(raw)
    row = np.empty_like(chunk)

    def by_pillow(body: bytes) -> Array:
        with patch("penstock.core.decode.jpeg_decoder", lambda: None):
            return decode(body, JPEG)

    parts: dict[str, Callable[[bytes], Any]] = {
        "decode": lambda body: decode(body, JPEG),
        "decode, Pillow alone": by_pillow,
        "copy into the table": lambda _: np.copyto(row, chunk),
    }
    if prepare is not None:
        parts["prepare"] = lambda _: prepare(raw)
    return parts


def cpu_us(run: Callable[[bytes], Any], bodies: Sequence[bytes]) -> float:
    """Processor time of one call in microseconds, over all bodies once."""
    start_s = time.process_time()
    for body in bodies:
        run(body)
    return (time.process_time() - start_s) / len(bodies) * 1e6


def server_us(bundle: Bundle, application: Application, bodies: Sequence[bytes], kind: str, seconds: float) -> Any:
    """Processor time of the front-end for one request, in microseconds, and the rate of the closed loop."""
    options = ("--frontends", "1", "--latency-ms", "2000", "--executor", "onnx")
    with running_server(bundle.folder, options) as server:
        target = jpeg_target(server.url, bundle.folder, application, bodies, kind)
        load_of = Load(rate=None, connections=CONNECTIONS, seconds=seconds)
        measure(target, replace(load_of, seconds=1.0))
        load_of = replace(load_of, warm_up_s=0.0)
        server.start_sampling()
        start_s = time.monotonic()
        result = measure(target, load_of)
        usage = server.usage()
        used_s = next(share for role, share in usage.cores.items() if role.startswith("front-end"))
        return used_s * (time.monotonic() - start_s) / result.offered * 1e6, result.answered_a_second


def main() -> None:
    """Read the command line, measure, print lines of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jpeg_requests", description=__doc__)
    parser.add_argument("--quality", type=int, default=75)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="no server, the parts alone")
    given = parser.parse_args()
    bodies = bodies_of(given.quality)
    size = f"JPEG of 500 x 375, quality {given.quality}, {np.mean([len(body) for body in bodies]):,.0f} bytes"
    with TemporaryDirectory() as folder:
        for model in MODELS:
            bundle = write_bundle(model, Path(folder) / model, bodies)
            application = find_application(str(HERE / f"{model}.py")).application
            parts = parts_of(bundle, application, bodies)
            # In turns, because other work on the machine changes with time.
            rounds = [{name: cpu_us(run, bodies) for name, run in parts.items()} for _ in range(ROUNDS)]
            for name in parts:
                _print([each[name] for each in rounds], f"{application.name}: {name}; {size}", "us")
            if given.parts:
                continue
            for kind, what in ((JPEG, size), (RAW, "raw bytes of the same inputs")):
                both = [server_us(bundle, application, bodies, kind, given.seconds) for _ in range(given.repeat)]
                _print([us for us, _ in both], f"{application.name}: front-end process, a request; {what}", "us")
                _print([rate for _, rate in both], f"{application.name}: closed loop, 1 front-end; {what}", "1/s")


def _print(values: list[float], workload: str, unit: str) -> None:
    metric = "processor time" if unit == "us" else "answers"
    print(json.dumps(asdict(make_measurement(values, workload=workload, metric=metric, unit=unit))), flush=True)


if __name__ == "__main__":
    main()
