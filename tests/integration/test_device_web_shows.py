"""The offline app shows something for every network: numbers, signals of a sensor, the words of live sound."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect
from safetensors.numpy import load_file, save_file

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.core.packs.pack import GOLDEN
from tests.support.device import WEB, finish_pack, write_live_pack, write_pack
from tests.support.device_fixtures import browser_fixture
from tests.support.device_page import Device
from tests.support.packs import COLOURS, colour_pack, flowers_pack, loud_pack, motion_pack, spots_pack

pytestmark = pytest.mark.slow


browser = browser_fixture()


def with_app(folder: Path) -> Path:
    """Put the app into a pack that a test made."""
    fields = json.loads((folder / "pack.json").read_text())
    shutil.copytree(WEB, folder / "web")
    return finish_pack(folder, {name: value for name, value in fields.items() if name not in ("files", "sha256")})


def test_a_picture_without_labels_is_answered_with_numbers(browser: Browser, tmp_path: Path) -> None:
    outputs = [
        {"name": "probabilities", "dtype": "float32", "shape": [4], "labels": [], "meaning": "amounts", "units": "g"},
        {"name": "embedding", "dtype": "float32", "shape": [3], "labels": None, "meaning": "", "units": ""},
    ]
    with CountingHost(write_pack(tmp_path / "pack", outputs=outputs, recognition=None)) as host:
        device = Device(browser, permissions=())
        page = device.installed(host)
        Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
        page.get_by_label("A photo from this device").set_input_files(tmp_path / "red.png")
        expect(page.locator("#numbers").get_by_label("embedding")).to_contain_text("[")
        expect(page.locator("#numbers").get_by_label("probabilities")).to_be_visible()
        expect(page.locator("#label")).to_be_hidden()
        device.close(host)


def test_a_signal_of_a_sensor_is_run_in_chunks(browser: Browser, tmp_path: Path) -> None:
    motion_pack(tmp_path / "pack", labels=True)
    with CountingHost(with_app(tmp_path / "pack")) as host:
        device = Device(browser)
        page = device.installed(host)
        signal = [[2, 1], [2, 1], [1, -2], [1, -2], [3, 0], [1, -1]]
        box = page.get_by_label("The inputs as JSON, by name")
        box.fill(json.dumps({"motion": signal}))
        page.get_by_role("button", name="Run").click()
        moves = page.get_by_label("moves", exact=True)
        expect(moves.locator("li b")).to_have_text(["up", "up", "down", "down", "up", "down"])
        expect(moves.locator("li small").first).to_contain_text("3")
        box.fill('{"motion": [[1, 2, 3]]}')
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#type-state")).to_contain_text("motion has")
        device.close(host)


def test_a_signal_without_labels_is_drawn(browser: Browser, tmp_path: Path) -> None:
    motion_pack(tmp_path / "pack", labels=False)
    with CountingHost(with_app(tmp_path / "pack")) as host:
        device = Device(browser)
        page = device.installed(host)
        page.get_by_label("The inputs as JSON, by name").fill(json.dumps({"motion": [[at, 1] for at in range(9)]}))
        page.get_by_role("button", name="Run").click()
        chart = page.get_by_role("img", name="moves: 9 points")
        expect(chart).to_be_visible()
        expect(chart.locator("path")).to_have_count(2)
        page.get_by_text("All 18 numbers").click()
        expect(page.get_by_label("moves", exact=True).locator("pre")).to_contain_text("[[1,-1],[2,0]")
        device.close(host)


def test_scores_are_percent_only_where_they_are_probabilities(browser: Browser, tmp_path: Path) -> None:
    for units in ("logit", "probability"):
        flowers_pack(tmp_path / units, units=units)
        with CountingHost(with_app(tmp_path / units)) as host:
            device = Device(browser)
            page = device.installed(host)
            page.get_by_label("The inputs as JSON, by name").fill('{"sizes": [0.5, 0, 0.25, 0]}')
            page.get_by_role("button", name="Run").click()
            kinds = page.get_by_label("kinds", exact=True)
            expect(kinds.locator("li b").first).to_have_text("50.0 %" if units == "probability" else "0.5")
            expect(kinds.locator(".remark")).to_have_count(0 if units == "probability" else 1)
            device.close(host)


def test_live_sound_names_its_words(browser: Browser, tmp_path: Path) -> None:
    with CountingHost(write_live_pack(tmp_path / "pack")) as host:
        device = Device(browser, permissions=())
        page = device.installed(host)
        expect(page.locator("#known")).to_have_text("It knows one word: loud.")
        device.close(host)


def choose(page: Page, number: int) -> Locator:
    """Choose a recorded example; return the line about its recorded answer."""
    button = page.get_by_role("button", name=f"Example {number}", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true", timeout=20_000)
    return page.locator(".recorded > summary")


def differs_little(line: Locator) -> None:
    # The answer comes after the example is marked.
    expect(line).to_contain_text("; the network's")
    said = line.inner_text()
    assert said.endswith("the network's is the same") or float(said.split()[-3]) < 1e-5, said


def test_every_recorded_picture_is_offered_with_its_recorded_answer(browser: Browser, tmp_path: Path) -> None:
    golden = colour_pack(tmp_path / "pack").golden()
    with CountingHost(with_app(tmp_path / "pack")) as host:
        device = Device(browser, permissions=())
        device.installed(host).close()
        host.stop()
        page = device.open(host)
        faces = page.locator(".examples button canvas")
        expect(faces).to_have_count(len(golden.inputs), timeout=30_000)
        for number, (given, recorded) in enumerate(zip(golden.inputs, golden.outputs, strict=True), 1):
            shown = faces.nth(number - 1).evaluate(
                "({ width, height }) => [height, width]",
            )
            assert tuple(shown) == given.shape[:2]
            line = choose(page, number)
            label = COLOURS[int(recorded.argmax())]
            expect(line).to_contain_text(f"Recorded answer: {label} {100 * recorded.max():.1f} %")
            differs_little(line)
            expect(page.locator("#label-big")).to_have_text(label)
            expect(page.locator("#photo")).to_be_visible()
        page.locator(".recorded > summary").click()
        expect(page.locator(".recorded").get_by_label("probabilities")).to_contain_text(COLOURS[0])
        Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
        page.get_by_label("A photo from this device").set_input_files(tmp_path / "red.png")
        expect(page.locator(".recorded")).to_be_hidden()
        expect(page.locator(".examples [aria-pressed]")).to_have_count(0)
        page.close()
        host.start()
        device.close(host)


def test_an_answer_that_differs_from_the_recorded_one_is_said(browser: Browser, tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
    golden = load_file(pack.folder / GOLDEN)
    golden["outputs"][0] = golden["outputs"][0][::-1]
    save_file(golden, pack.folder / GOLDEN)
    with CountingHost(with_app(pack.folder)) as host:
        page = Device(browser, permissions=()).installed(host)
        line = choose(page, 1)
        expect(line).to_contain_text("the network's differs by 1.0 at most")
        expect(line).to_contain_text("Recorded answer: blue")
        expect(page.locator("#label-big")).to_have_text("red")


def test_boxes_of_a_recorded_picture_are_drawn_and_said(browser: Browser, tmp_path: Path) -> None:
    golden = spots_pack(tmp_path / "pack").golden()
    with CountingHost(with_app(tmp_path / "pack")) as host:
        device = Device(browser, permissions=())
        page = device.installed(host)
        for number in range(1, len(golden.inputs) + 1):
            line = choose(page, number)
            expect(page.locator("#boxed")).to_be_visible()
            said = page.locator("#label-big").inner_text()
            expect(line).to_contain_text(f"Recorded answer: {said}; ")
            differs_little(line)
        device.close(host)


def test_recorded_signals_are_run_whole(browser: Browser, tmp_path: Path) -> None:
    for name, write in (("motion", lambda to: motion_pack(to, labels=True)), ("loud", loud_pack)):
        golden = write(tmp_path / name).golden()
        with CountingHost(with_app(tmp_path / name)) as host:
            device = Device(browser, permissions=())
            page = device.installed(host)
            for number in range(1, len(golden.inputs) + 1):
                differs_little(choose(page, number))
            device.close(host)


def test_examples_that_are_too_large_for_a_device_are_not_kept_and_that_is_said(
    browser: Browser, tmp_path: Path
) -> None:
    pack = colour_pack(tmp_path / "pack")
    golden = load_file(pack.folder / GOLDEN)
    save_file(golden | {"raw.0": np.zeros((1500, 1500, 4), np.uint8)}, pack.folder / GOLDEN)
    with CountingHost(with_app(pack.folder)) as host:
        device = Device(browser, permissions=())
        page = device.installed(host)
        said = page.get_by_label("Recorded examples")
        expect(said).to_have_text("The recorded examples are too large to keep on this device: 9 MB.")
        assert not [path for path, _ in host.sent if GOLDEN in path]
        device.close(host)
