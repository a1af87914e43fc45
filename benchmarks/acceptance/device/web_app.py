"""Figures of the offline web app in headless Chromium: inference time, transfer, start, memory, camera."""

import base64
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.acceptance.device.chromium import Heaps, camera_context, read_script, started, wait
from benchmarks.acceptance.device.counting_host import CountingHost
from benchmarks.acceptance.device.film import as_seen, write_film
from penstock.core.errors import BenchError
from penstock.core.spec import Array

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from playwright.sync_api import Page

WARM_UP, RUNS, ROUNDS = 20, 30, 5
STARTS = 5
SOAK_S, SOAK_WARM_UP_S = 600.0, 120.0
MAX_MODEL_BYTES, MAX_FILE_BYTES = 5_000_000, 25_000_000
HEIGHT, WIDTH = 480, 640
EACH = 6
BITS, BLOCK = 6, 24  # a frame's number as black and white squares, outside the network's centre crop
PIXELS_WITHIN = 2
# Crops of each golden picture that are filmed.
CROPS = 3
MAX_FILMED = 48

ENGINE = read_script("open_engine.js")
RUN = read_script("run_engine.js")
FILMED = read_script("record_frames.js")
PIXELS = read_script("frame_pixels.js")


@contextmanager
def running_app(
    pack: Path, film: Path | None = None, on_request: Callable[[str], None] = lambda url: None
) -> "Generator[tuple[CountingHost, Page]]":
    """The app of a pack in Chromium, with its host.

    Args:
        pack: The pack.
        film: What the camera shows; Chromium's own test picture by default.
        on_request: Called with the URL of each request.
    """
    with CountingHost(pack) as host, camera_context(film) as context:
        context.on("request", lambda request: on_request(request.url))
        page = context.new_page()
        started(page, host.page)
        yield host, page


def wasm_over_native(pack: Path) -> list[float]:
    """Inference time in the browser over that of native ONNX Runtime, on one thread each; a ratio per round."""
    session = session_of(pack)
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
    asked = {"base64": base64.b64encode(pixels_HWC.tobytes()).decode(), "width": WIDTH, "height": HEIGHT}
    with running_app(pack) as (_, page):
        page.locator("#camera-start").click()
        page.evaluate(ENGINE)
        page.evaluate(RUN, asked | {"runs": WARM_UP})
        _native_ms(session, pixels_HWC, WARM_UP)
        return [
            median(page.evaluate(RUN, asked | {"runs": RUNS})) / median(_native_ms(session, pixels_HWC, RUNS))
            for _ in range(ROUNDS)
        ]


def first_transfer_mb(pack: Path) -> list[float]:
    """Megabytes transferred until the app first runs, from a host without compression."""
    files = [file for file in pack.rglob("*") if file.is_file() and "index" not in file.relative_to(pack).parts]
    large = [file.name for file in files if file.stat().st_size > MAX_FILE_BYTES]
    if large or (pack / "model.onnx").stat().st_size > MAX_MODEL_BYTES:
        raise BenchError(f"the network has more than {MAX_MODEL_BYTES:,} bytes, or a file is too large: {large}.")
    with running_app(pack) as (host, _):
        return [sum(size for _, size in host.sent) / 1e6]


def offline_seconds(pack: Path) -> list[float]:
    """Seconds from a reload without a host to the first label; no request may go to another origin."""
    requests: list[str] = []
    with running_app(pack, on_request=requests.append) as (host, page):
        host.stop()
        seconds: list[float] = []
        for _ in range(STARTS):
            started(page, host.page)
            seconds.append(page.evaluate("window.firstMs") / 1000)
        elsewhere = [url for url in requests if not url.startswith((host.url, "blob:"))]
        if elsewhere:
            raise BenchError(f"the app requested {elsewhere[0]}, which is of another origin.")
        return seconds


def soak_heap_growth(pack: Path, seconds: float = SOAK_S, warm_up_s: float = SOAK_WARM_UP_S) -> list[float]:
    """Growth of the memory of the page and its workers over a long camera run, relative to that after a warm-up."""
    with running_app(pack) as (_, page):
        heaps = Heaps(page)
        sizes: list[int] = []
        for lasting_s in (warm_up_s, seconds):
            page.wait_for_timeout(1000 * lasting_s)
            if float(page.locator("#rate").inner_text()) <= 0:
                raise BenchError("the app processes no frames.")
            # Stopped, so that no frame is in flight.
            page.locator("#camera-start").click()
            sizes.append(heaps.used_bytes())
            page.locator("#camera-start").click()
            wait(page, "window.frames.length > 0")
        return [sizes[-1] / sizes[0] - 1]


def camera_agreement(pack: Path) -> list[float]:
    """Share of a fake camera's frames whose likeliest entry is that of the same pixels in Python.

    Random crops of the pack's golden pictures are filmed.
    """
    pictures = filmed_pictures(pack)
    numbered = [_numbered(picture, number) for number, picture in enumerate(pictures)]
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.y4m"
        write_film(film, numbered, each=EACH)
        with running_app(pack, film) as (_, page):
            page.evaluate(FILMED, [list(_middle(bit)) for bit in range(BITS)])
            wait(page, f"Object.keys(window.pixels).length >= {len(pictures)} && window.filmed.length > 500")
            filmed: list[tuple[int, int]] = page.evaluate("window.filmed")
            expected = [_expected(pack, page, number, picture) for number, picture in enumerate(numbered)]
    return [sum(expected[number] == likeliest for number, likeliest in filmed) / len(filmed)]


def filmed_pictures(pack: Path) -> list[Array]:
    """Random crops of the pack's golden pictures, RGB uint8 `[480, 640, 3]`."""
    golden = load_file(pack / "golden.safetensors")
    raws = [golden[name] for name in sorted(golden) if name.startswith("raw.")]
    if not raws:
        raise BenchError(f"{pack} has no golden pictures of any size; a camera's frames are not its input.")
    rng = np.random.default_rng(0)
    pictures = [_filling(raw[..., :3], rng.uniform(1, 1.6), rng) for raw in raws for _ in range(CROPS)]
    return pictures[:MAX_FILMED]


def _filling(picture_HWC: Array, zoom: float, rng: np.random.Generator) -> Array:
    height, width, _ = picture_HWC.shape
    scale = zoom * max(HEIGHT / height, WIDTH / width)
    size = (max(WIDTH, round(scale * width)), max(HEIGHT, round(scale * height)))
    left, top = (int(rng.integers(0, extra + 1)) for extra in (size[0] - WIDTH, size[1] - HEIGHT))
    box = (left, top, left + WIDTH, top + HEIGHT)
    return np.asarray(Image.fromarray(picture_HWC).resize(size).crop(box))


def session_of(pack: Path) -> "InferenceSession":
    """The pack's network in native ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(pack / "model.onnx", options, providers=["CPUExecutionProvider"])


def _native_ms(session: "InferenceSession", pixels_HWC: Array, runs: int) -> list[float]:
    given = {session.get_inputs()[0].name: pixels_HWC}
    return [1000 * seconds for seconds in repeat(lambda: session.run(None, given), number=1, repeat=runs)]


def _numbered(picture_HWC: Array, number: int) -> Array:
    picture_HWC = picture_HWC.copy()
    for bit in range(BITS):
        x, y = _middle(bit)
        half = BLOCK // 2
        picture_HWC[y - half : y + half, x - half : x + half] = 255 * (number >> bit & 1)
    return picture_HWC


def _middle(bit: int) -> tuple[int, int]:
    return BLOCK, BLOCK * (1 + 2 * bit)


def _expected(pack: Path, page: "Page", number: int, picture_HWC: Array) -> int:
    """The likeliest entry of a frame in Python; its pixels in the browser must agree up to rounding."""
    seen_HWC = as_seen(picture_HWC)
    there_HWC = np.frombuffer(base64.b64decode(page.evaluate(PIXELS, number)), np.uint8).reshape(HEIGHT, WIDTH, 4)
    difference = np.abs(there_HWC[..., :3].astype(int) - seen_HWC).max()
    if difference > PIXELS_WITHIN:
        raise BenchError(f"a pixel of frame {number} differs by {difference} of 255 from what was filmed.")
    opaque_HWC = np.dstack([seen_HWC, np.full((HEIGHT, WIDTH), 255, np.uint8)])
    session = session_of(pack)
    outputs: Any = session.run(None, {session.get_inputs()[0].name: opaque_HWC})
    return int(np.argmax(outputs[0]))
