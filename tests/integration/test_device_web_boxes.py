"""Boxes in the offline app, in headless Chromium: drawn over the frame or photo that they were found in."""

import io
import json
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from benchmarks.acceptance.device.film import write_film
from penstock.core.spec import Array
from tests.support.device import WEB, finish_pack
from tests.support.device_fixtures import browser_fixture, device_fixture, host_fixture, page_fixture
from tests.support.device_page import seen
from tests.support.packs import spots_pack

pytestmark = pytest.mark.thorough

SIDE, STEP, POSITIONS = 60, 24, 8
RED, GREEN = (230, 20, 20), (20, 230, 20)
DATA = Path(__file__).parents[1] / "data"
# Each answer comes several frames after its frame was taken. What the canvas shows is read as the answer is told.
LATE = """
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (...given) { setTimeout(() => post.apply(this, given), 150); };
// Its own canvas, as a browser complains of one on the screen that is read again and again.
const copy = new OffscreenCanvas(320, 240).getContext("2d", { willReadFrequently: true });
document.addEventListener("penstock-frame", ({ detail }) => {
  const canvas = document.getElementById("boxed");
  const { width, height } = canvas;
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  let [left, right] = [width, 0];
  for (let at = 0; at < width * height; at++) {
    if (data[4 * at] < 180 || data[4 * at + 1] > 90) continue;
    left = Math.min(left, at % width);
    right = Math.max(right, (at % width) + 1);
  }
  detail.answer.red = [left, right];
}, { capture: true });
"""


def street(left: int, width: int = 320, height: int = 240) -> Array:
    picture = np.full((height, width, 3), 20, np.uint8)
    picture[90 : 90 + SIDE, left : left + SIDE] = RED
    return picture


@pytest.fixture(scope="module")
def pack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pack = spots_pack(tmp_path_factory.mktemp("pack"))
    shutil.copytree(WEB, pack.folder / "web")
    fields = {name: value for name, value in pack.to_json().items() if name != "files"}
    return finish_pack(pack.folder, fields)


browser = browser_fixture(
    camera=lambda film: write_film(film, [street(30 + STEP * at) for at in range(POSITIONS)], each=1)
)
host = host_fixture()
device = device_fixture(script=LATE)
page = page_fixture()


def shown(page: Page) -> Image.Image:
    url = page.locator("#boxed").evaluate("canvas => canvas.toDataURL()")
    return Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")


def check(frames: list[dict[str, Any]], *, mirrored: bool) -> None:
    assert len({frame["red"][0] for frame in frames}) > 1
    for frame in frames:
        (found,) = frame["found"]
        left, _, right, _ = found["box"]
        assert right - left == pytest.approx(SIDE, abs=3)
        # The line of the box covers the edge.
        assert frame["red"] == pytest.approx([320 - right, 320 - left] if mirrored else [left, right], abs=3)


def test_boxes_belong_to_the_frame_that_is_shown(page: Page) -> None:
    check(seen(page, 4), mirrored=False)
    expect(page.locator("#label-big")).to_have_text("1 car")
    expect(page.locator("#bars li")).to_have_count(1)
    assert "with boxes: car 0." in (page.locator("#boxed").get_attribute("aria-label") or "")


def test_a_front_camera_is_mirrored_with_its_boxes(page: Page) -> None:
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#boxed")).to_be_hidden()
    page.evaluate(
        """() => {
            const { getSettings } = MediaStreamTrack.prototype;
            MediaStreamTrack.prototype.getSettings = function () {
                return { ...getSettings.call(this), facingMode: "user" };
            };
        }"""
    )
    page.get_by_role("button", name="Start the camera").click()
    check(seen(page, 4), mirrored=True)


def test_a_photo_with_its_boxes_and_one_of_nothing(page: Page, tmp_path: Path) -> None:
    both, none = street(30), np.full((60, 90, 3), 5, np.uint8)
    both[10:40, 200:260] = GREEN
    # The last one is larger than the canvas is made.
    for name, picture, said in (("both.png", both, "1 car, 1 person"), ("none.png", none, "nothing found")):
        Image.fromarray(picture).save(tmp_path / name)
        page.get_by_label("A photo from this device").set_input_files(tmp_path / name)
        expect(page.locator("#label-big")).to_have_text(said)
        expect(page.locator("#boxed")).to_be_visible()
    assert page.locator("#boxed").get_attribute("aria-label") == "The picture: nothing was found"
    assert np.asarray(shown(page)).max() < 20
    expect(page.locator("#bars li")).to_have_count(0)
    Image.fromarray(both.repeat(10, 0).repeat(10, 1)).save(tmp_path / "large.png")
    page.get_by_label("A photo from this device").set_input_files(tmp_path / "large.png")
    expect(page.locator("#label-big")).to_have_text("1 car, 1 person")
    picture = shown(page)
    assert picture.size == (2048, 1536)
    # The left sides of the boxes: of the first class and of the second.
    pixels = [picture.getpixel((round(6.4 * x), round(6.4 * y))) for x, y in ((30, 120), (200, 25))]
    assert pixels == [(0xFF, 0xD5, 0x4A), (0x4D, 0xD0, 0xE1)]


def test_what_is_found_is_the_same_as_in_python(page: Page) -> None:
    for example in json.loads((DATA / "boxes.json").read_text()):
        said = page.evaluate(
            """async ({ shows, boxes, classes, scores, height, width }) => {
                const { found, sentence } = await import("./boxes.js");
                const outputs = {
                    [shows.boxes]: { values: Float32Array.from(boxes.flat()) },
                    [shows.classes]: { values: BigInt64Array.from(classes.map(BigInt)) },
                    [shows.scores]: { values: Float32Array.from(scores) },
                };
                const each = found(shows, outputs, { width, height });
                return { found: each, line: sentence(each) };
            }""",
            example,
        )
        assert said == {name: example[name] for name in ("found", "line")}, example["name"]
    # A picture that the network saw at half its size.
    half = page.evaluate(
        """async () => {
            const { found } = await import("./boxes.js");
            const shows = { labels: ["car"], frame: [8, 16], boxes: "b", classes: "c", scores: "s", least: 0 };
            const outputs = { b: { values: Float32Array.of(1, 2, 3, 4) }, c: { values: [0] }, s: { values: [1] } };
            return found(shows, outputs, { width: 16, height: 8 }, { width: 32, height: 16 })[0].box;
        }"""
    )
    assert half == [2, 4, 6, 8]


@pytest.mark.parametrize(("width", "height"), [(320, 640), (844, 390)])
def test_every_screen_shows_the_whole_picture_and_what_was_found(page: Page, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    assert seen(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    canvas, label = page.locator("#boxed").bounding_box(), page.locator("#label-big").bounding_box()
    assert canvas
    assert label
    assert label["y"] + label["height"] <= height
    assert page.locator("#boxed").evaluate("canvas => getComputedStyle(canvas).objectFit") == "contain"
