"""Headless Chromium, driven by Playwright: what `penstock verify`, the benchmarks and the tests open pages in."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PackError, one_line

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
# Chromium reads only the last --disable-features, so this list repeats Playwright's. The two WebUI features load pages
# of the address bar in each window, which take 0.7 s of a core.
DISABLED_FEATURES = (
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxPopup",
)
# No sandbox, since only our own pages are opened; and the browser itself sends nothing out.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    f"--disable-features={','.join(DISABLED_FEATURES)}",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)
POLL_MS = 50


@contextmanager
def open_chromium(*arguments: str, **options: Any) -> "Generator[Browser]":
    """Start a headless Chromium and close it at the end.

    Args:
        arguments: Command-line switches besides `ARGUMENTS`.
        options: Other options of Playwright's `launch`.

    Raises:
        PackError: Playwright or Chromium is missing, or Chromium does not start.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise PackError("Playwright, which drives Chromium, is not installed; pip install playwright.") from None
    found = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=[*ARGUMENTS, *arguments], **options)
        except Error as error:
            raise PackError(f"Chromium cannot be started ({one_line(error)}); install it: 'make browser'.") from None
        try:
            yield browser
        finally:
            browser.close()


def wait_for(page: "Page", expression: str, timeout_s: float = 60) -> bool:
    """Poll a JavaScript expression of a page until it is true.

    Playwright's own wait evaluates code in the page, which the page's content security policy forbids.

    Returns:
        Whether it became true within the timeout.
    """
    from playwright.sync_api import Error

    for _ in range(round(timeout_s * 1000 / POLL_MS)):
        try:
            if page.evaluate(expression):
                return True
        except Error as error:
            # The page reloads itself once it is installed.
            if "context was destroyed" not in str(error):
                raise
        page.wait_for_timeout(POLL_MS)
    return False
