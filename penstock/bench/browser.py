"""A headless Chromium that opens packs' apps."""

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
    "--enable-blink-features=ForceEagerMeasureMemory",
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


def call(page: "Page", function: str, argument: Any = None) -> Any:
    """What a JavaScript function of the page gives."""
    return page.evaluate(function, argument)
