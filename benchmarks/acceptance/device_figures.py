"""Figures of devices, for one pack of pictures: `python -m benchmarks.acceptance device --pack DIR`."""

from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.acceptance import pack_cost, watching, web_app
from benchmarks.acceptance.figures import FigureSpec
from penstock.core.errors import BenchError
from penstock.core.spec import Array

# Crops of each golden picture that are filmed.
CROPS = 3
MAX_FILMED = 48


def device_figures(pack: Path, bundle: Path | None = None) -> dict[str, FigureSpec]:
    """The figures of a pack, by target.

    Args:
        pack: A pack whose input is a picture of any size.
        bundle: The bundle that it was made of; without it, the figures that need it are left out.

    Raises:
        BenchError: There is no pack there.
    """
    if not (pack / "pack.json").is_file():
        raise BenchError(f"{pack} is no pack; 'penstock export BUNDLE --to DIR' writes one.")
    made_of = {} if bundle is None else bundle_figures(bundle, pack)
    return made_of | {
        "device.video_age_p95": FigureSpec(
            measure=lambda: watching.video_age_p95(pack),
            workload=f"penstock watch on one core: {watching.FRAMES} frames of 640x480 H.264, {watching.RATE} a second",
            metric="p95 age of an answer, from when its frame was due, less 1.2 times the network's own time",
            unit="intervals",
        ),
        "device.engine_overhead": FigureSpec(
            measure=lambda: watching.engine_overhead(pack),
            workload=f"a picture of 640x480, one thread, {watching.ROUNDS} rounds of {watching.RUNS} in turns",
            metric="median time of the engine over that of the bare ONNX Runtime session",
            unit="ratio",
        ),
        "device.wasm_over_native": FigureSpec(
            measure=lambda: web_app.wasm_over_native(pack),
            workload=f"a picture of 640x480, one thread each, {web_app.ROUNDS} rounds of {web_app.RUNS}, "
            f"after {web_app.WARM_UP}",
            metric="median time of the network, prepare included, in Chromium (WASM) over ONNX Runtime in Python",
            unit="ratio",
        ),
        "device.first_transfer_mb": FigureSpec(
            measure=lambda: web_app.first_transfer_mb(pack),
            workload="the first start of the web app from a host that compresses nothing",
            metric="bytes of all files that came, the network included",
            unit="MB",
        ),
        "device.offline_seconds": FigureSpec(
            measure=lambda: web_app.offline_seconds(pack),
            workload="reload of the web app with its host killed, a live camera of 640x480; nothing asks elsewhere",
            metric="navigation to the first label",
            unit="s",
        ),
        "device.soak_heap_growth": FigureSpec(
            measure=lambda: web_app.soak_heap_growth(pack),
            workload=f"the web app before a live camera for {web_app.SOAK_S:g} s after {web_app.SOAK_WARM_UP_S:g} s",
            metric="JavaScript heap and buffers of the page, its worker and service worker, over those before, minus 1",
            unit="fraction",
        ),
        "device.camera_agreement": FigureSpec(
            measure=lambda: web_app.camera_agreement(pack, filmed_pictures(pack)),
            workload="crops of the golden pictures on a film before Chromium's camera; every pixel within 2 of 255",
            metric="share of frames whose likeliest label is that of the same pixels in Python",
            unit="fraction",
        ),
    }


def bundle_figures(bundle: Path, pack: Path) -> dict[str, FigureSpec]:
    """The figures of a bundle and its pack."""
    return {
        "device.export_seconds": FigureSpec(
            measure=lambda: pack_cost.export_seconds(bundle),
            workload=f"penstock export BUNDLE --to DIR, {pack_cost.EXPORTS} times",
            metric="wall time of the process",
            unit="s",
        ),
        "device.sameness": FigureSpec(
            measure=lambda: pack_cost.sameness(bundle, pack),
            workload="golden examples: a server (PNG files), the Python engine, the web app; top-1 the same",
            metric="largest difference of a probability from training's code",
            unit="abs",
        ),
    }


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
    scale = zoom * max(web_app.HEIGHT / height, web_app.WIDTH / width)
    size = (max(web_app.WIDTH, round(scale * width)), max(web_app.HEIGHT, round(scale * height)))
    left, top = (int(rng.integers(0, extra + 1)) for extra in (size[0] - web_app.WIDTH, size[1] - web_app.HEIGHT))
    box = (left, top, left + web_app.WIDTH, top + web_app.HEIGHT)
    return np.asarray(Image.fromarray(picture_HWC).resize(size).crop(box))
