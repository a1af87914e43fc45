"""A headless Chromium that opens packs' apps."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import BenchError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--use-fake-device-for-media-stream",
    # Of a browser that is measured no window is seen, and its timers must not be slowed down for that.
    "--disable-renderer-backgrounding",
)
# The figures of each frame, as the app tells them; `firstMs` is when the first of them was shown.
RECORD = """
window.frames = [];
document.addEventListener("penstock-frame", ({ detail }) => {
  window.firstMs ??= performance.now();
  const { answer, outputs, ...figures } = detail;
  window.frames.push(figures);
  if (window.frames.length > 100) window.frames.shift();
});
"""
STARTS_WITHIN_MS = 60_000
# One collection may leave what the next one finds.
COLLECTIONS = 3


@contextmanager
def chromium(film: Path | None = None) -> "Generator[Browser]":
    """A browser whose camera plays a film over and over.

    Args:
        film: Y4M; Chromium's own picture where left out.

    Raises:
        BenchError: There is no Chromium, or the package that drives it is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BenchError("Chromium is driven by playwright; pip install 'penstock[dev]'.") from None
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        raise BenchError(f"there is none of {', '.join(BROWSERS)} here; run 'make browser'.")
    camera = [f"--use-file-for-fake-video-capture={film}"] if film else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*ARGUMENTS, *camera])
        try:
            yield browser
        finally:
            browser.close()


def device(browser: "Browser") -> "BrowserContext":
    """A device of its own, which may use its camera."""
    context = browser.new_context(permissions=["camera"])
    context.add_init_script(RECORD)
    return context


def started(page: "Page", url: str, frames: int = 1) -> None:
    """Open the app and wait until so many frames have their answer."""
    page.goto(url)
    page.locator("#label").wait_for(timeout=STARTS_WITHIN_MS)
    wait_for(page, f"window.frames?.length >= {min(frames, 100)}")


def wait_for(page: "Page", expression: str) -> None:
    """Wait until an expression is true; the page's policy forbids the evaluation that Playwright's own wait uses."""
    for _ in range(STARTS_WITHIN_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise BenchError(f"the app did not come so far that {expression}.")


class Heaps:
    """The JavaScript heaps of a page, its workers and its service worker, by Chromium's own protocol."""

    def __init__(self, page: "Page") -> None:
        self._page = page
        self._session = page.context.new_cdp_session(page)
        self._workers: list[str] = []
        self._answers: dict[tuple[str, int], dict[str, Any]] = {}
        self._asked = 0
        self._session.on("Target.attachedToTarget", lambda event: self._workers.append(event["sessionId"]))
        self._session.on("Target.receivedMessageFromTarget", self._answered)
        attach = {"autoAttach": True, "waitForDebuggerOnStart": False, "flatten": False}
        self._session.send("Target.setAutoAttach", attach)
        page.wait_for_timeout(500)
        if not self._workers:
            raise BenchError("the app has no worker whose memory could be measured.")

    def used_bytes(self) -> int:
        """Of objects and buffers that are left after everything unused was collected."""
        usages: list[dict[str, Any]] = []
        for _ in range(COLLECTIONS):
            self._page.wait_for_timeout(200)
            self._session.send("HeapProfiler.collectGarbage")
            usages = [self._session.send("Runtime.getHeapUsage")]
            for worker in self._workers:
                self._ask(worker, "HeapProfiler.collectGarbage")
                usages.append(self._ask(worker, "Runtime.getHeapUsage"))
        return sum(int(usage["usedSize"] + usage["backingStorageSize"]) for usage in usages)

    def _ask(self, worker: str, method: str) -> dict[str, Any]:
        self._asked += 1
        message = json.dumps({"id": self._asked, "method": method})
        self._session.send("Target.sendMessageToTarget", {"sessionId": worker, "message": message})
        for _ in range(STARTS_WITHIN_MS // 10):
            if answer := self._answers.pop((worker, self._asked), None):
                return answer["result"]
            self._page.wait_for_timeout(10)
        raise BenchError(f"a worker does not answer {method}.")

    def _answered(self, event: dict[str, Any]) -> None:
        message = json.loads(event["message"])
        if "id" in message:
            self._answers[event["sessionId"], message["id"]] = message
