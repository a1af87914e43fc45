"""Frames of films beside what Chromium draws of them on a canvas: colours, and phones that were turned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.core.spec import Array
from penstock.device.sources import open_frames
from penstock.verify.chromium import open_chromium
from tests.support.videos import turned, video

# Eight colours behind one another; of each the middle is compared, where no neighbour mixes in.
COLOURS = (
    (200, 90, 30),
    (30, 160, 220),
    (240, 240, 240),
    (20, 20, 20),
    (190, 40, 150),
    (60, 200, 80),
    (128, 128, 128),
    (230, 210, 60),
)
NEAR = 4
# Chromium's own conversion of BT.709, where it has no GPU, is so far from the colours that were filmed; ours is not.
NEAR_BLUE_BT709 = 12
DRAW = """async (name) => {
    const video = document.createElement("video");
    video.muted = true;
    // A frame may be decoded ("loadeddata") before there is anything to draw: wait until one was presented.
    const presented = new Promise((ready, failed) => {
        video.requestVideoFrameCallback(ready);
        video.onerror = () => failed(new Error(video.error.message));
    });
    document.body.replaceChildren(video);
    video.src = name;
    await presented;
    const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(video, 0, 0);
    const { width, height } = canvas;
    const across = width === 256 ? [0, height >> 1, width, 1] : [width >> 1, 0, 1, height];
    return { width, height, data: Array.from(context.getImageData(...across).data) };
}"""
CASES: dict[str, dict[str, Any]] = {
    "untagged.mp4": {"tags": (2, 2, 2, 1)},
    "untagged-hd.mp4": {"tags": (2, 2, 2, 1), "height": 720},
    "bt601.mp4": {"tags": (6, 6, 6, 1)},
    "bt601-hd.mp4": {"tags": (6, 6, 6, 1), "height": 720},
    "bt709.mp4": {"tags": (1, 1, 1, 1)},
    "bt709-full.mp4": {"tags": (1, 1, 1, 2)},
    "full.mp4": {"tags": (2, 2, 2, 2)},
    "matrix-alone.mp4": {"tags": (1, 2, 2, 1)},
    "matrix-alone-hd.mp4": {"tags": (6, 2, 2, 1), "height": 720},
    "vp9.webm": {"tags": (2, 2, 2, 1), "codec": "libvpx-vp9"},
    "vp9-hd.webm": {"tags": (2, 2, 2, 1), "codec": "libvpx-vp9", "height": 720},
    "vp9-bt709.webm": {"tags": (1, 2, 2, 1), "codec": "libvpx-vp9"},
    "vp8.webm": {"tags": (2, 2, 2, 1), "codec": "libvpx"},
    "vp8-hd.webm": {"tags": (2, 2, 2, 1), "codec": "libvpx", "height": 720},
    "turned.mp4": {"tags": (1, 1, 1, 1), "turn": (0, 1, -1, 0)},
    "upside-down.mp4": {"tags": (1, 1, 1, 1), "turn": (-1, 0, 0, -1)},
    "turned-back.mp4": {"tags": (1, 1, 1, 1), "turn": (0, -1, 1, 0)},
}


def stripes(height: int) -> Array:
    return np.repeat(np.array(COLOURS, np.uint8), 32, 0)[None].repeat(height, 0)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The films, and what Chromium draws of the first frame of each, across the stripes."""
    folder = tmp_path_factory.mktemp("films")
    (folder / "index.html").write_text("<!doctype html><title>films</title>")
    for name, made in CASES.items():
        options = {"codec": made.get("codec", "libx264"), "tags": made["tags"]}
        video(folder / name, [stripes(made.get("height", 64))] * 2, **options)
        if "turn" in made:
            turned(folder / name, made["turn"])
    seen: dict[str, Any] = {}
    with CountingHost(folder) as host, open_chromium() as browser:
        page = browser.new_page()
        page.goto(f"{host.url}index.html")
        for name in CASES:
            seen[name] = page.evaluate(DRAW, name)
    return folder, seen


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_a_browser(drawn: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, seen = drawn
    source = open_frames(str(folder / name))
    pixels = next(source.items()).read()
    source.close()
    assert pixels.shape == (seen[name]["height"], seen[name]["width"], 4)
    along = pixels[pixels.shape[0] // 2] if pixels.shape[1] == 256 else pixels[:, pixels.shape[1] // 2]
    theirs = np.array(seen[name]["data"]).reshape(256, 4)
    # The middles of the stripes.
    apart = np.abs(along.astype(int) - theirs)[16::32]
    assert apart[:, [0, 1, 3]].max() <= NEAR
    assert apart[:, 2].max() <= NEAR_BLUE_BT709
