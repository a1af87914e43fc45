"""The web app of a pack in headless Chromium, with a film as its camera; and the memory that it holds."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import BenchError
from penstock.verify.chromium import open_chromium, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

STARTS_WITHIN_S = 60
# Garbage that one collection leaves is found by the next.
COLLECTIONS = 3


def read_script(name: str) -> str:
    """Return a script of this folder, to run in a page."""
    return Path(__file__).with_name(name).read_text()


@contextmanager
def camera_context(film: Path | None = None) -> "Generator[BrowserContext]":
    """A browser profile that may use its camera and records every frame's figures.

    Args:
        film: A film (Y4M) that the camera plays in a loop; Chromium's own test picture by default.
    """
    camera = ["--use-fake-device-for-media-stream", f"--use-file-for-fake-video-capture={film}" if film else ""]
    # No window is visible; timers must not be throttled for that.
    with open_chromium("--disable-renderer-backgrounding", *filter(None, camera)) as browser:
        context = browser.new_context(permissions=["camera"])
        context.add_init_script(read_script("record_figures.js"))
        yield context


def started(page: "Page", url: str) -> None:
    """Open the app and wait until a frame is answered."""
    page.goto(url)
    page.locator("#label").wait_for(timeout=1000 * STARTS_WITHIN_S)
    wait(page, "window.frames?.length > 0")


def wait(page: "Page", expression: str) -> None:
    """Wait until an expression is true.

    Raises:
        BenchError: It did not become true in time.
    """
    if not wait_for(page, expression, STARTS_WITHIN_S):
        raise BenchError(f"the app did not reach {expression} within {STARTS_WITHIN_S} s.")


class Heaps:
    """JavaScript heaps of a page, its workers and its service worker, by the Chrome DevTools protocol."""

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
            raise BenchError("the app has no worker to measure.")

    def used_bytes(self) -> int:
        """Bytes of objects and buffers after garbage collection."""
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
        for _ in range(STARTS_WITHIN_S * 100):
            if answer := self._answers.pop((worker, self._asked), None):
                return answer["result"]
            self._page.wait_for_timeout(10)
        raise BenchError(f"a worker does not answer {method}.")

    def _answered(self, event: dict[str, Any]) -> None:
        message = json.loads(event["message"])
        if "id" in message:
            self._answers[event["sessionId"], message["id"]] = message
