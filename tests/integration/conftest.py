"""What the tests of whole paths share: a trained network, a server of it, and a browser before it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from penstock.core.pack import Pack
from penstock.export.write import export_pack
from tests.support.page import BROWSER_ARGUMENTS, BROWSERS, Watch, url_of
from tests.support.prepared import pictures_bundle
from tests.support.serving import RunningServer


@pytest.fixture(scope="session")
def digits_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits network, trained for this session of tests: a fifth of its recipe reads what is drawn here."""
    run = tmp_path_factory.mktemp("digits") / "run"
    command = [sys.executable, "-m", "penstock", "train", "digits", "--epochs", "12", "--out", str(run)]
    subprocess.run(command, check=True, timeout=150)
    return run / "bundle"


@pytest.fixture(scope="session")
def pictures_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    """A pack of pictures of any size, in 8 bits too, and its bundle."""
    folder = tmp_path_factory.mktemp("pictures")
    bundle = pictures_bundle(folder).folder
    return export_pack(bundle, folder / "pack", int8=True).pack, bundle


# Playwright runs an event loop of its own as long as it is open, and asyncio allows a thread only one: hence not longer
# than a module.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"The tests of the page need one of {', '.join(BROWSERS)}: run `make browser`."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(digits_bundle: Path) -> Iterator[RunningServer]:
    """The digits, with a budget that a busy machine keeps too."""
    with RunningServer(digits_bundle) as server:
        yield server


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    """The page, ready to draw. At the end it must not have complained, nor asked another origin for anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator(".draw canvas").wait_for()
    yield page
    page.close()
    assert watch.complaints == []
    assert watch.requests
    assert all(url.startswith(url_of(server)) for url in watch.requests)
