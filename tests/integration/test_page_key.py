"""The page of a server that requires an API key: it asks for one, keeps it in its tab, and reports what is wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer, write_doubler

pytestmark = pytest.mark.thorough

KEY, OTHER = "anna-0123456789abcdef", "ben-0123456789abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("doubler")
    (folder / "keys").write_text(f"anna {KEY}\n")
    with RunningServer(write_doubler(folder), "--api-keys", str(folder / "keys")) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    """The page, where it asks for the key."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    watch.look_at(page)
    page.goto(url_of(server))
    expect(page.locator("#key-dialog")).to_be_visible()
    yield page
    page.close()
    # A browser itself reports every answer of status 4xx.
    assert all("401" in complaint for complaint in watch.complaints)
    assert all(url.startswith(url_of(server)) for url in watch.requests)


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def connected(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("connected")
    expect(page.locator("#key-dialog")).to_be_hidden()


def test_a_key_opens_the_page_and_goes_with_every_request(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("needs a key")
    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    enter(page, KEY)
    connected(page)
    page.locator("#json").fill("[1, 2, 3, 4]")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer > .reply")).to_contain_text("doubled")
    # The command to copy says where the key goes, and does not show it.
    assert 'Authorization: Bearer $API_KEY"' in (page.locator(".shell code").text_content() or "")
    assert KEY not in page.content()
    assert KEY not in page.url


def test_a_wrong_key_is_said_and_asked_for_again(page: Page) -> None:
    enter(page, OTHER)
    expect(page.locator("#key-problem")).to_have_text("This server does not know that key.")
    expect(page.get_by_label("API key", exact=True)).to_have_value("")
    enter(page, f"  {KEY}\n")
    connected(page)


def test_what_cannot_be_a_key_is_not_sent(page: Page, watch: Watch) -> None:
    before = len(watch.requests)
    for wrong in ("", "two words", "größe"):
        enter(page, wrong)
        expect(page.locator("#key-dialog")).to_be_visible()
    assert len(watch.requests) == before


def test_it_is_kept_for_the_tab_alone(browser: Browser, server: RunningServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(url_of(server))
    enter(page, KEY)
    connected(page)
    page.reload()
    connected(page)
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    other = context.new_page()
    other.goto(url_of(server))
    expect(other.locator("#key-dialog")).to_be_visible()
    context.close()


def test_a_key_that_is_taken_back_is_asked_for_again(page: Page) -> None:
    enter(page, KEY)
    connected(page)
    page.evaluate("sessionStorage.setItem('penstock-api-key', 'something-else-by-now')")
    expect(page.locator("#key-dialog")).to_be_visible()
    enter(page, KEY)
    connected(page)


def test_who_does_not_want_to_enter_one_is_told_how_to_later(page: Page) -> None:
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#notice")).to_contain_text("Reload the page to enter one")
    page.wait_for_timeout(1500)
    expect(page.locator("#key-dialog")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_dialog_fits_and_can_be_read(
    browser: Browser, server: RunningServer, tmp_path: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
    page.goto(url_of(server))
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    enter(page, OTHER)
    expect(page.locator("#key-problem")).to_have_text("This server does not know that key.")
    box = dialog.bounding_box()
    assert box is not None
    assert box["x"] >= 16
    assert box["x"] + box["width"] <= width - 16
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=tmp_path / f"key-{scheme}-{width}.png")
    page.close()
