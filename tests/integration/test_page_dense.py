"""The page of a dense network: a picture of any size and a recorded tile, with their finds marked."""

import io
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.support.dense import spotted, write_dense
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_dense(tmp_path_factory.mktemp("dense")), "--latency-ms", "2000") as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator("#file").wait_for()
    yield page
    page.close()


def give(page: Page, file: Path, *spots: tuple[int, int], height: int = 60, width: int = 70) -> None:
    Image.fromarray(spotted(height, width, *spots)).save(file)
    page.locator("#file").set_input_files(file)


def test_a_picture_is_shown_with_its_finds_marked(page: Page, watch: Watch, tmp_path: Path) -> None:
    give(page, tmp_path / "slide.png", (30, 20), (52, 40))
    finds = page.get_by_label("Finds", exact=True).locator("li")
    expect(finds).to_have_count(2)
    assert sorted(finds.all_inner_texts()) == ["dark 1.00 at 30, 20", "dark 1.00 at 52, 40"]
    picture = page.locator("canvas.boxed")
    expect(picture).to_have_attribute(
        "aria-label", "The picture with 2 marked: dark 1.00 at 30, 20; dark 1.00 at 52, 40"
    )
    # 5 rows of 6 tiles; white ones are not sent.
    expect(page.locator(".answer-time")).to_contain_text("30 tiles, ")
    tiles = [each for each in watch.requests if each.endswith("/v1/apps/darkness")]
    assert 2 <= len(tiles) <= 10
    url = picture.evaluate("canvas => canvas.toDataURL()")
    seen = Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")
    assert seen.size == (70, 60)
    # The find itself, and a place that is neither.
    assert seen.getpixel((30, 20)) == (0, 0, 0)
    assert seen.getpixel((5, 55)) == (255, 255, 255)
    # A circle is neither black nor white.
    colours = [seen.getpixel((x, 20)) for x in range(70)]
    assert any(isinstance(each, tuple) and each[1] > 150 > each[0] for each in colours)

    give(page, tmp_path / "white.png")
    expect(picture).to_have_attribute("aria-label", "The picture: nothing was found")
    expect(finds).to_have_count(0)
    assert watch.complaints == []


def test_a_recorded_tile_is_shown_as_it_is(page: Page, watch: Watch) -> None:
    page.get_by_role("button", name="Example 1").click()
    expect(page.locator(".answer-time")).to_contain_text("1 tile, ")
    expect(page.locator("canvas.boxed")).to_be_visible()
    assert watch.complaints == []


def test_what_is_no_picture_gets_a_sentence_and_the_next_one_works(page: Page, watch: Watch, tmp_path: Path) -> None:
    Image.fromarray(spotted(60, 70, (30, 20))).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:60])
    (tmp_path / "slide.svs").write_bytes(b"II*\0")
    for name in ("cut.png", "slide.svs"):
        page.locator("#file").set_input_files(tmp_path / name)
        expect(page.locator(".message")).to_contain_text(f"{name} is no picture")
    page.locator("#file").set_input_files(tmp_path / "whole.png")
    expect(page.get_by_label("Finds", exact=True).locator("li")).to_have_count(1)
    expect(page.locator(".message")).to_have_text("")
    # A refusal of the server is shown as it came.
    page.route("**/v1/apps/darkness", lambda route: route.fulfill(status=500, json={"error": "It failed."}))
    give(page, tmp_path / "other.png", (20, 20))
    expect(page.locator(".message")).to_have_text("It failed.")
