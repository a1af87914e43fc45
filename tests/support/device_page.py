"""Hands and eyes for the offline app in Chromium."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from penstock.bench.static_host import Host
from tests.support.page import BROWSER_ARGUMENTS, BROWSERS

# Every frame's answer and figures, as the app tells them.
RECORD = """
window.frames = [];
document.addEventListener("penstock-frame", ({ detail }) => {
  const { answer, outputs, ...figures } = detail;
  window.frames.push({ ...figures, ...answer, grey: outputs.embedding?.[0] });
  if (window.frames.length > 1000) window.frames.shift();
});
"""
# What a browser says by itself of each request that is not answered: of a pack that is not signed, of one without an
# index, of a host that is gone.
ITS_OWN = "Failed to load resource"


@contextmanager
def chromium(*, camera: Path | None = None, microphone: Path | None = None, **options: Any) -> Generator[Browser]:
    """A browser whose camera plays a film over and over, and whose microphone hears a file once."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"The tests of the app need one of {', '.join(BROWSERS)}: run `make browser`."
    fakes = ["--use-fake-device-for-media-stream"]
    fakes += [f"--use-file-for-fake-video-capture={camera}"] if camera else []
    fakes += [f"--use-file-for-fake-audio-capture={microphone}%noloop"] if microphone else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*BROWSER_ARGUMENTS, *fakes], **options)
        yield browser
        browser.close()


class Device:
    """Somebody's device: a browser with its own storage, and what its pages said and asked for."""

    def __init__(self, browser: Browser, *, permissions: tuple[str, ...] = ("camera", "microphone"), **options: Any):
        self.context: BrowserContext = browser.new_context(permissions=list(permissions), **options)
        self.context.add_init_script(RECORD)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("console", lambda message: self._said(message.type, message.text))
        self.context.on("weberror", lambda error: self.complaints.append(str(error.error)))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith(ITS_OWN):
            self.complaints.append(text)

    def open(self, host: Host) -> Page:
        """The app's page, another one each time."""
        page = self.context.new_page()
        page.goto(host.page)
        return page

    def installed(self, host: Host) -> Page:
        """The app's page once a version is on the device and runs."""
        page = self.open(host)
        runs(page)
        return page

    def close(self, host: Host) -> None:
        """Nothing was complained about, and nobody else was asked for anything."""
        self.context.close()
        assert self.complaints == []
        assert self.requests
        assert all(url.startswith((host.url, "blob:")) for url in self.requests), self.requests


def runs(page: Page) -> None:
    """Wait until the app is there and has looked for a newer version."""
    expect(page.locator("#update")).not_to_be_empty(timeout=30_000)


def seen(page: Page, count: int) -> list[dict[str, Any]]:
    """What was said of the next so many frames."""
    page.evaluate("window.frames.length = 0")
    deadline_ms = 30_000
    while page.evaluate("window.frames.length") < count:
        assert (deadline_ms := deadline_ms - 50) > 0, f"{page.evaluate('window.frames.length')} frames of {count} came"
        page.wait_for_timeout(50)
    return page.evaluate("window.frames")
