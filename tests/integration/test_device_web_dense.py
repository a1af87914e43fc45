"""The offline app of a dense network: a picture of any size, tile by tile, with its finds marked."""

from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from tests.integration.test_device_web_shows import with_app
from tests.support.dense import dense_pack, spotted
from tests.support.device_fixtures import browser_fixture
from tests.support.device_page import Device

pytestmark = pytest.mark.slow


browser = browser_fixture()


def test_a_picture_is_run_in_tiles_and_its_finds_are_marked(browser: Browser, tmp_path: Path) -> None:
    dense_pack(tmp_path / "pack")
    with CountingHost(with_app(tmp_path / "pack")) as host:
        device = Device(browser, permissions=())
        page = device.installed(host)
        (tmp_path / "cut.png").write_bytes(b"\x89PNG")
        Image.fromarray(spotted(60, 70, (30, 20), (52, 40))).save(tmp_path / "slide.png")
        Image.fromarray(spotted(60, 70)).save(tmp_path / "white.png")
        choice = page.get_by_label("A picture of any size, which is cut into tiles")
        choice.set_input_files(tmp_path / "cut.png")
        expect(page.locator("#slide-state")).to_contain_text("cut.png is no picture")
        choice.set_input_files(tmp_path / "slide.png")
        finds = page.get_by_label("Finds", exact=True).locator("li")
        expect(page.locator("#slide-state")).to_have_text("30 of 30 tiles")
        expect(finds).to_have_count(2)
        assert sorted(finds.all_inner_texts()) == ["dark 1.00 at 30, 20", "dark 1.00 at 52, 40"]
        expect(page.locator("#slide-picture")).to_have_attribute(
            "aria-label", "The picture with 2 marked: dark 1.00 at 30, 20; dark 1.00 at 52, 40"
        )
        choice.set_input_files(tmp_path / "white.png")
        expect(page.locator("#slide-picture")).to_have_attribute("aria-label", "The picture: nothing was found")
        expect(finds).to_have_count(0)
        device.close(host)


@pytest.mark.parametrize("module", ["finds.js", "overview.js"])
def test_app_and_page_merge_and_mark_finds_by_the_same_code(module: str) -> None:
    root = Path(__file__).parents[2] / "penstock"
    assert (root / "device/web" / module).read_bytes() == (root / "serve/page" / module).read_bytes()
