"""Fixtures of the integration tests: a trained network, a server of it, and a browser."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from penstock.core.packs.pack import Pack, read_pack
from penstock.export.pack_writer import export_pack
from penstock.verify.chromium import open_chromium
from tests.support.page import Watch, url_of
from tests.support.prepared import shared_pictures
from tests.support.serving import RunningServer
from tests.support.shared import made_once


@pytest.fixture(scope="session")
def digits_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits network, trained once a run: a fifth of its recipe is enough for the drawings of these tests."""

    def train(folder: Path) -> None:
        command = [sys.executable, "-m", "penstock", "train", "digits", "--epochs", "12", "--out", str(folder / "run")]
        subprocess.run(command, check=True, timeout=150)

    return made_once(tmp_path_factory, "digits", train) / "run" / "bundle"


@pytest.fixture(scope="session")
def pictures_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    """A pack of pictures of any size, with an int8 graph, and its bundle."""
    bundle = shared_pictures(tmp_path_factory).folder
    folder = made_once(tmp_path_factory, "pictures-pack", lambda to: export_pack(bundle, to / "pack", int8=True))
    return read_pack(folder / "pack"), bundle


# Playwright runs an event loop of its own as long as it is open, and asyncio allows a thread only one: hence not longer
# than a module.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(digits_bundle: Path) -> Iterator[RunningServer]:
    """A server of the digits, with a latency budget that holds on a busy machine."""
    with RunningServer(digits_bundle) as server:
        yield server


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    """The page, ready to draw. It must end without complaints or requests to another origin."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator(".draw canvas").wait_for()
    yield page
    page.close()
    assert watch.complaints == []
    assert watch.requests
    assert all(url.startswith(url_of(server)) for url in watch.requests)
