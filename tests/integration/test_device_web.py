"""The offline app before a camera, in headless Chromium: the right label for each frame, with the network gone."""

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from benchmarks.acceptance.device.film import write_film
from penstock.core.spec import Array
from tests.support.device import (
    GROUPS,
    IDS,
    LABELS,
    finish_pack,
    number_of,
    picture_of,
    sha256_of,
    write_pack,
    write_small_pack,
)
from tests.support.device_fixtures import browser_fixture, device_fixture, host_fixture, page_fixture
from tests.support.device_page import Device, runs, seen

EACH = 8
FRAME_MS = 50


@pytest.fixture(scope="module")
def pack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("pack") / "pack")


browser = browser_fixture(
    camera=lambda film: write_film(
        film, [picture_of(number) for number in range(IDS)], each=EACH, rate=1000 // FRAME_MS
    )
)
host = host_fixture()
device = device_fixture()
page = page_fixture()


def steady_of(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the same number as three before: the first frames of another colour are smoothed with others."""
    numbers = [number_of(frame["grey"]) for frame in frames]
    return [frame for at, frame in enumerate(frames) if at >= 3 and len(set(numbers[at - 3 : at + 1])) == 1]


def steady_frames(page: Page, count: int) -> list[dict[str, Any]]:
    """Wait for some frames of which some are steady: a busy machine may leave out those of a whole colour."""
    end_s = time.monotonic() + 30
    while not steady_of(frames := seen(page, count)):
        assert time.monotonic() < end_s, [number_of(frame["grey"]) for frame in frames]
    return frames


def numbers_of(frames: list[dict[str, Any]]) -> list[int]:
    """The numbers that frames carry, each of which was given the label of its own."""
    numbers = [number_of(frame["grey"]) for frame in frames]
    steady = steady_of(frames)
    assert steady
    for frame in steady:
        number = number_of(frame["grey"])
        assert (frame["label"], frame["group"]) == (LABELS[number % len(LABELS)], GROUPS[number % len(GROUPS)])
    return numbers


def test_each_frame_gets_the_label_of_its_id_and_ids_advance(page: Page) -> None:
    frames = steady_frames(page, 3 * EACH)
    numbers = numbers_of(frames)
    times_ms = [frame["capturedMs"] for frame in frames]
    for (before, after), (before_ms, after_ms) in zip(pairwise(numbers), pairwise(times_ms), strict=True):
        # A busy machine leaves out frames, while the film goes on.
        assert (after - before) % IDS <= 2 + (after_ms - before_ms) // (EACH * FRAME_MS)
    assert len(set(numbers)) > 1
    expect(page.locator("#label-small")).to_contain_text("%")
    # Above 1. None is shown for the first frame after a pause.
    expect(page.locator("#rate")).to_have_text(re.compile(r"^(1\.[1-9]|([2-9]|\d{2,})\.\d)$"))
    assert page.locator("#age-ms").inner_text().endswith("ms")


@pytest.mark.thorough
def test_with_the_network_gone_the_app_starts_again(browser: Browser, tmp_path: Path) -> None:
    device = Device(browser)
    with CountingHost(write_pack(tmp_path / "pack")) as host:
        device.installed(host).close()
        host.stop()
        before = len(host.sent)
        page = device.open(host)
        expect(page.locator("#label")).to_be_visible(timeout=30_000)
        expect(page.locator("#update")).to_have_text("The host is not there; the app does without.")
        page.reload()
        assert len(seen(page, 3)) >= 3
        assert len(host.sent) == before
        device.close(host)


@pytest.mark.thorough
def test_of_a_slow_network_the_latest_frame_wins(browser: Browser, tmp_path: Path) -> None:
    with CountingHost(write_pack(tmp_path / "slow", slow=24)) as host:
        device = Device(browser)
        page = device.installed(host)
        frames = seen(page, 6)
        first, last = frames[0], frames[-1]
        # More frames came than were processed, one at a time, and each answer is of a frame that was new then.
        assert last["presented"] - first["presented"] > last["processed"] - first["processed"] == len(frames) - 1
        taken = [frame["capturedMs"] for frame in frames]
        assert taken == sorted(set(taken))
        # A queue would answer frames that were taken 50 ms one after the other, however long each answer takes.
        assert taken[-1] - taken[0] > 0.5 * sum(frame["modelMs"] for frame in frames[1:])
        assert min(frame["modelMs"] for frame in frames) > 100
        device.close(host)


def test_a_photo_from_disk(page: Page, tmp_path: Path) -> None:
    # The last one is larger than the network takes.
    for name, number, said, width in (
        ("red.png", 0, "warm", 90),
        ("blue.jpg", 3, "cool", 90),
        ("red.jpg", 0, "warm", 6000),
    ):
        Image.fromarray(picture_of(number, width=width, height=122)).save(tmp_path / name)
        page.get_by_label("A photo from this device").set_input_files(tmp_path / name)
        expect(page.locator("#label")).to_be_visible()
        expect(page.locator("#label-big")).to_have_text(said)
        expect(page.locator("#photo")).to_be_visible()
        expect(page.locator("#label-small")).to_contain_text(name.partition(".")[0])
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    page.get_by_label("A photo from this device").set_input_files(tmp_path / "broken.jpg")
    expect(page.locator("#stage-text")).to_have_text("The browser cannot read broken.jpg as a picture.")
    page.get_by_role("button", name="Start the camera").click()
    assert seen(page, 2)
    expect(page.locator("#photo")).to_be_hidden()


def test_neither_the_page_nor_its_worker_can_ask_anybody_else(
    browser: Browser, host: CountingHost, tmp_path: Path
) -> None:
    (tmp_path / "asked").write_text("")
    with CountingHost(tmp_path, headers={"Access-Control-Allow-Origin": "*"}) as other:
        device = Device(browser)
        page = device.installed(host)
        ask = "url => fetch(url).then(() => 'came', () => 'refused')"
        assert [asker.evaluate(ask, f"{other.url}asked") for asker in (page, *page.workers)] == ["refused"] * 2
        assert other.sent == []
        device.context.close()


@pytest.mark.thorough
def test_of_two_photos_the_one_that_was_chosen_last_is_seen(page: Page, tmp_path: Path) -> None:
    for name, number in (("large.png", 0), ("small.png", 3)):
        Image.fromarray(picture_of(number)).save(tmp_path / name)
    page.evaluate(
        """() => {
            const { createImageBitmap } = window;
            window.createImageBitmap = async (source, ...more) => {
                if (source.name === "large.png") await new Promise((resolve) => (window.decoded = resolve));
                return createImageBitmap(source, ...more);
            };
        }"""
    )
    for name in ("large.png", "small.png"):
        page.get_by_label("A photo from this device").set_input_files(tmp_path / name)
    # What was said of a picture before is still there, hidden.
    expect(page.locator("#label")).to_be_visible()
    expect(page.locator("#label-big")).to_have_text("cool")
    shown = page.locator("#photo").get_attribute("src")
    page.evaluate("decoded()")
    page.wait_for_timeout(300)
    assert page.locator("#photo").get_attribute("src") == shown
    expect(page.locator("#label-big")).to_have_text("cool")


def test_the_same_pixels_give_the_same_answer_as_onnx_runtime(page: Page, host: CountingHost) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(host.folder / "model.onnx")
    rng = np.random.default_rng(3)
    page.evaluate(
        """async () => {
            const { Engine } = await import("./engine.js");
            window.engine = new Engine(await (await fetch("../pack.json")).json());
            await engine.open();
        }"""
    )
    for shape in ((5, 8, 4), (61, 34, 4), (80, 112, 4)):
        pixels = rng.integers(0, 256, shape, np.uint8)
        there = page.evaluate(
            """async ({ data, width, height }) => {
                const { outputs } = await engine.pixels({ data: Uint8ClampedArray.from(data), width, height });
                return Array.from(outputs.probabilities);
            }""",
            {"data": pixels.ravel().tolist(), "width": shape[1], "height": shape[0]},
        )
        here = np.asarray(session.run(["probabilities"], {"pixels": pixels})[0])[0]
        np.testing.assert_allclose(there, here, rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_a_network_of_one_size_gets_the_middle_of_a_picture(browser: Browser, tmp_path: Path) -> None:
    with CountingHost(write_small_pack(tmp_path / "small")) as host:
        device = Device(browser)
        page = device.installed(host)
        picture = np.zeros((60, 100, 3), np.uint8)
        picture[:, 50:80] = 255  # right in the middle square; the black beyond it is not seen
        picture[:, :20] = 255
        Image.fromarray(picture).save(tmp_path / "right.png")
        page.get_by_label("A photo from this device").set_input_files(tmp_path / "right.png")
        expect(page.locator("#label-big")).to_have_text("right")
        # 32 of 64 pixels of 255 / 2000 each against none, but for those in the middle, which see a bit of both: 98.3.
        # A frame of the camera may have been "right" before.
        expect(page.locator("#bars b").first).to_have_text(re.compile(r"^9(7\.[3-9]|8\.\d|9\.[0-3])"))
        expect(page.locator("#resized")).to_be_visible()
        device.close(host)


NOTHING_TO_SHOW: dict[str, dict[str, Any]] = {
    "takes float32 [null,3]": {
        "inputs": [{"name": "pixels", "dtype": "float32", "shape": [None, 3], "max_shape": [9, 3]}]
    },
    'has float16 "pixels"': {"inputs": [{"name": "pixels", "dtype": "float16", "shape": [3]}]},
}


@pytest.mark.thorough
def test_a_network_that_is_not_for_pictures_is_said(browser: Browser, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "pack")
    with CountingHost(pack) as host:
        for sentence, fields in NOTHING_TO_SHOW.items():
            write_pack(pack, **fields)
            device = Device(browser)
            page = device.installed(host)
            expect(page.locator("#notice")).to_contain_text(sentence)
            expect(page.locator("main:visible")).to_have_count(0)
            device.close(host)


@pytest.mark.thorough
def test_a_network_that_cannot_be_loaded_is_said(browser: Browser, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "broken")
    fields = json.loads((pack / "pack.json").read_text())
    (pack / "model.onnx").write_bytes(b"no network")
    del fields["files"]
    with CountingHost(finish_pack(pack, fields)) as host:
        device = Device(browser)
        page = device.installed(host)
        expect(page.locator("#notice")).to_contain_text("The network does not run here: ")
        Image.fromarray(picture_of(0)).save(tmp_path / "red.png")
        page.get_by_label("A photo from this device").set_input_files(tmp_path / "red.png")
        expect(page.locator("#stage-text")).to_contain_text("The network does not run: ")
        expect(page.locator("#photo")).to_be_hidden()
        device.context.close()


@pytest.mark.thorough
def test_a_camera_that_is_denied_is_said_and_can_be_allowed(browser: Browser, host: CountingHost) -> None:
    device = Device(browser, permissions=())
    page = device.installed(host)
    page.get_by_role("button", name="Start the camera").click()
    expect(page.locator("#stage-text")).to_contain_text("The browser may not use the camera.")
    device.context.grant_permissions(["camera"])
    page.get_by_role("button", name="Try again").click()
    assert seen(page, 2)
    device.close(host)


@pytest.mark.thorough
def test_another_camera_can_be_chosen(page: Page) -> None:
    # Chromium has one camera where it plays a film, so that the other one is the same in disguise.
    page.evaluate(
        """() => {
            const { mediaDevices } = navigator;
            const list = mediaDevices.enumerateDevices.bind(mediaDevices);
            const open = mediaDevices.getUserMedia.bind(mediaDevices);
            const other = { kind: "videoinput", deviceId: "other", label: "The other one" };
            mediaDevices.enumerateDevices = async () => [...(await list()), other];
            mediaDevices.getUserMedia = async ({ video }) => {
                window.asked = video.deviceId;
                return open({ video: true });
            };
            mediaDevices.dispatchEvent(new Event("devicechange"));
        }"""
    )
    page.get_by_label("Camera", exact=True).select_option("The other one")
    assert seen(page, 2)
    assert page.evaluate("window.asked") == {"exact": "other"}


PROBLEMS = {
    "NotFoundError": "There is no camera.",
    "NotReadableError": "another program may be using it",
    "OverconstrainedError": "not there any more",
    "AbortError": "The camera cannot be opened: a reason",
}


@pytest.mark.thorough
def test_why_there_is_no_picture_is_said(page: Page) -> None:
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#stage-text")).to_have_text("The camera is off.")
    page.evaluate("void (window.allowed = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices))")
    for name, sentence in PROBLEMS.items():
        page.evaluate(
            """name => void (navigator.mediaDevices.getUserMedia = async () => {
                throw new DOMException("a reason", name);
            })""",
            name,
        )
        page.locator("#camera-start").click()
        expect(page.locator("#stage-text")).to_contain_text(sentence)
    page.evaluate(
        "void (navigator.mediaDevices.getUserMedia = async (wishes) => (window.media = await allowed(wishes)))"
    )
    page.get_by_role("button", name="Try again").click()
    assert seen(page, 2)
    page.evaluate("media.getVideoTracks()[0].dispatchEvent(new Event('ended'))")
    expect(page.locator("#stage-text")).to_contain_text("The camera is gone.")
    page.get_by_role("button", name="Try again").click()
    assert seen(page, 2)


@pytest.mark.thorough
def test_a_front_camera_is_a_mirror_for_the_eye_alone(page: Page) -> None:
    page.get_by_role("button", name="Stop").click()
    page.evaluate(
        """() => {
            const { getSettings } = MediaStreamTrack.prototype;
            MediaStreamTrack.prototype.getSettings = function () {
                return { ...getSettings.call(this), facingMode: "user" };
            };
        }"""
    )
    page.get_by_role("button", name="Start the camera").click()
    # Mirrored pixels would have the number on the left, and a colour on the right.
    assert numbers_of(steady_frames(page, 2 * EACH))
    assert page.locator("#video").evaluate("video => getComputedStyle(video).transform") == "matrix(-1, 0, 0, 1, 0, 0)"


@pytest.mark.thorough
def test_the_most_like_pictures_of_an_index_are_found_offline(browser: Browser, tmp_path: Path) -> None:
    device = Device(browser)
    pack = write_pack(tmp_path / "pack")
    vectors = write_index(pack)
    with CountingHost(pack) as host:
        page = device.installed(host)
        expect(page.locator("#search-count")).to_have_text("40")
        page.close()
        host.stop()
        page = device.open(host)
        runs(page)
        picture = picture_of(0)
        picture[:, 160:] = (200, 90, 30)
        Image.fromarray(picture).save(tmp_path / "ask.png")
        page.get_by_label("A photo from this device").set_input_files(tmp_path / "ask.png")
        expect(page.locator("#found li")).to_have_count(5)
        cosines = vectors @ (np.array([200, 90, 30]) / np.linalg.norm([200, 90, 30]))
        expected = np.argsort(-cosines, kind="stable")[:5]
        said = page.locator("#found li").all_inner_texts()
        assert [text.split()[0] for text in said] == [f"picture{index}.jpg" for index in expected]
        assert [float(text.split()[-1]) for text in said] == pytest.approx(cosines[expected], abs=1e-3)
        assert page.locator("#found img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
        device.close(host)


@pytest.mark.thorough
def test_an_index_of_another_network_or_with_a_flipped_byte_is_refused(browser: Browser, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "pack")
    write_index(pack)
    (pack / "index" / "vectors.npy").write_bytes((pack / "index" / "vectors.npy").read_bytes()[:-1] + b"x")
    with CountingHost(pack) as host:
        device = Device(browser)
        page = device.installed(host)
        expect(page.locator("#notice")).to_contain_text("vectors.npy does not match index.json")
        about = json.loads((pack / "index" / "index.json").read_text())
        (pack / "index" / "index.json").write_text(json.dumps(about | {"model": "0" * 64}))
        page.reload()
        expect(page.locator("#notice")).to_contain_text("made by another network")
        expect(page.locator("#search")).to_be_hidden()
        device.close(host)


def write_index(pack: Path) -> Array:
    """Forty random unit vectors, two of them equal, with thumbnails."""
    rng = np.random.default_rng(1)
    vectors = rng.uniform(0, 1, (40, 3)).astype(np.float32)
    vectors[7] = vectors[31]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    folder = pack / "index"
    (folder / "thumbs").mkdir(parents=True)
    np.save(folder / "vectors.npy", vectors)
    items: list[dict[str, str]] = []
    for index in range(len(vectors)):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / "thumbs" / f"{index}.jpg")
        items.append({"file": f"picture{index}.jpg", "sha256": "", "thumbnail": f"thumbs/{index}.jpg"})
    (folder / "items.json").write_text(json.dumps(items))
    hashes = {name: sha256_of(folder / name) for name in ("items.json", "vectors.npy")}
    about = {"schema_version": 1, "model": sha256_of(pack / "model.onnx"), "dim": 3, "sha256": hashes}
    (folder / "index.json").write_text(json.dumps(about))
    return vectors


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "height"), [(320, 640), (390, 844), (844, 390)])
def test_every_screen_shows_the_label_without_scrolling_sideways(page: Page, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    assert seen(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#label-big", "#camera-start"):
        box = page.locator(name).bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    label = page.locator("#label-big").bounding_box()
    assert label
    assert label["y"] + label["height"] <= height
