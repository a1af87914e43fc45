"""Fixtures of tests of the offline app: a browser, a host of a pack, a device that has the app, and a page of it.

A test module assigns those that it needs; `host` serves the fixture `pack_folder`, which the module defines:

    browser = browser_fixture(camera=write_street)
    host = host_fixture()
    device = device_fixture()
    page = page_fixture()
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

from benchmarks.acceptance.device.counting_host import CountingHost
from tests.support.device_page import Device, chromium

Write = Callable[[Path], None]


def browser_fixture(*, camera: Write | None = None, microphone: Write | None = None) -> Any:
    """Return the fixture of a browser for a module.

    Args:
        camera: Writes the film (Y4M) that its camera plays; a test pattern by default.
        microphone: Writes the sound (WAV) that its microphone hears; beeps by default.
    """

    @pytest.fixture(scope="module")
    def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
        folder = tmp_path_factory.mktemp("media")
        files: dict[str, Path] = {}
        for name, file, write in (("camera", "film.y4m", camera), ("microphone", "voice.wav", microphone)):
            if write is not None:
                files[name] = folder / file
                write(files[name])
        with chromium(**files) as browser:
            yield browser

    return browser


def host_fixture(scope: Literal["function", "module"] = "module") -> Any:
    """Return the fixture of a host of `pack_folder`."""

    @pytest.fixture(scope=scope)
    def host(pack_folder: Path) -> Iterator[CountingHost]:
        with CountingHost(pack_folder) as host:
            yield host

    return host


def device_fixture(*, installed: bool = True, script: str | None = None) -> Any:
    """Return the fixture of a device for a module, which must end without complaints.

    Args:
        installed: Whether it has the app from the start.
        script: JavaScript that its later pages run first.
    """

    @pytest.fixture(scope="module")
    def device(browser: Browser, host: CountingHost) -> Iterator[Device]:
        device = Device(browser)
        if installed:
            device.installed(host).close()
        if script is not None:
            device.context.add_init_script(script)
        yield device
        device.close(host)

    return device


def page_fixture() -> Any:
    """Return the fixture of a page of the app for a test."""

    @pytest.fixture
    def page(device: Device, host: CountingHost) -> Iterator[Page]:
        page = device.installed(host)
        yield page
        page.close()

    return page
