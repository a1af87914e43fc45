"""Actions on the offline app in Chromium, and records of its pages."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.verify.chromium import open_chromium

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
    fakes = ["--use-fake-device-for-media-stream"]
    fakes += [f"--use-file-for-fake-video-capture={camera}"] if camera else []
    fakes += [f"--use-file-for-fake-audio-capture={microphone}%noloop"] if microphone else []
    with open_chromium(*fakes, **options) as browser:
        yield browser


class Device:
    """A device: a browser with its own storage, the console of its pages and their requests."""

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

    def open(self, host: CountingHost) -> Page:
        """Open another page of the app."""
        page = self.context.new_page()
        page.goto(host.page)
        return page

    def installed(self, host: CountingHost) -> Page:
        """Open a page of the app and wait until a version is installed and runs."""
        page = self.open(host)
        runs(page)
        return page

    def close_pages(self) -> None:
        """Close all pages of the app; wait until a version that waited for that has taken over.

        Chromium stops the worker of the old version then. With DevTools attached, as Playwright does, it stops it even
        if a page that was opened in between waits for its answer, and that page waits forever.
        """
        blank = self.context.new_page()
        session = self.context.new_cdp_session(blank)
        statuses: dict[str, str] = {}
        session.on("ServiceWorker.workerVersionUpdated", lambda event: statuses.update(_statuses(event)))
        session.send("ServiceWorker.enable")
        for page in self.context.pages:
            if page is not blank:
                page.close()
        deadline_ms = 30_000
        while set(statuses.values()) - {"redundant"} != {"activated"}:
            assert (deadline_ms := deadline_ms - 50) > 0, f"no version took over: {statuses}"
            blank.wait_for_timeout(50)
        blank.close()

    def close(self, host: CountingHost) -> None:
        """Assert that the console has no complaints and that all requests went to the host."""
        self.context.close()
        assert self.complaints == []
        assert self.requests
        assert all(url.startswith((host.url, "blob:")) for url in self.requests), self.requests


def _statuses(event: dict[str, Any]) -> dict[str, str]:
    """Status of each version of service workers in an event of DevTools, by its identifier."""
    return {version["versionId"]: version["status"] for version in event["versions"]}


def runs(page: Page) -> None:
    """Wait until the app runs and has checked for a newer version."""
    expect(page.locator("#update")).not_to_be_empty(timeout=30_000)


def seen(page: Page, count: int) -> list[dict[str, Any]]:
    """Wait for some frames; return their results."""
    page.evaluate("window.frames.length = 0")
    deadline_ms = 30_000
    while page.evaluate("window.frames.length") < count:
        assert (deadline_ms := deadline_ms - 50) > 0, f"{page.evaluate('window.frames.length')} frames of {count} came"
        page.wait_for_timeout(50)
    return page.evaluate("window.frames")
