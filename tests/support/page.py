"""Drawing on the page, records of its console and requests, and load on its server."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from math import cos, radians, sin

from playwright.sync_api import ConsoleMessage, Error, Page, Request

from tests.support.serving import RunningServer

Point = tuple[float, float]
Stroke = list[Point]


def arc(x: float, y: float, wide: float, high: float, start: float, end: float) -> Stroke:
    """Points along an ellipse around `x, y`, between two angles in degrees, clockwise from the right."""
    angles = [radians(start + (end - start) * step / 12) for step in range(13)]
    return [(x + wide * cos(angle), y + high * sin(angle)) for angle in angles]


# Digits as a hand draws them, in shares of the drawing area from its upper left corner.
DRAWINGS: dict[str, list[Stroke]] = {
    "0": [arc(0.5, 0.5, 0.2, 0.32, -90, 270)],
    "1": [[(0.36, 0.34), (0.52, 0.18), (0.52, 0.84)]],
    "2": [[*arc(0.5, 0.36, 0.2, 0.17, -160, 40), (0.3, 0.82), (0.74, 0.82)]],
    "3": [[*arc(0.47, 0.34, 0.19, 0.16, -150, 90), *arc(0.47, 0.66, 0.22, 0.17, -90, 150)]],
    "4": [[(0.56, 0.16), (0.28, 0.6), (0.76, 0.6)], [(0.62, 0.38), (0.6, 0.86)]],
    "5": [[(0.7, 0.18), (0.36, 0.18), (0.34, 0.46), *arc(0.48, 0.63, 0.21, 0.19, -110, 140)]],
    "6": [[(0.62, 0.16), *arc(0.52, 0.62, 0.22, 0.42, -150, -180), *arc(0.5, 0.66, 0.2, 0.19, 180, -180)]],
    "7": [[(0.26, 0.2), (0.74, 0.2), (0.44, 0.86)]],
    "8": [[*arc(0.5, 0.34, 0.16, 0.16, 90, -270), *arc(0.5, 0.67, 0.19, 0.17, -90, 270)]],
    "9": [[*arc(0.5, 0.36, 0.18, 0.18, 0, -360), (0.68, 0.36), (0.6, 0.86)]],
}


def url_of(server: RunningServer) -> str:
    return f"http://{server.host}:{server.port}/"


class Watch:
    """Messages in the console of a page, and the URLs of its requests."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def look_at(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", self._error)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _error(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)


def draw(page: Page, strokes: list[Stroke], *, size: float = 1, left: float = 0, top: float = 0) -> None:
    """Draw with the mouse; size and offset are shares of the area."""
    area = page.locator(".draw canvas").bounding_box()
    assert area is not None
    for stroke in strokes:
        points = [
            (area["x"] + (left + x * size) * area["width"], area["y"] + (top + y * size) * area["height"])
            for x, y in stroke
        ]
        page.mouse.move(*points[0])
        page.mouse.down()
        for x, y in points[1:]:
            page.mouse.move(x, y, steps=2)
        page.mouse.up()


def wait_until(page: Page, holds: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait for a condition while the page runs and its events are taken: a busy machine needs longer."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s"
        page.wait_for_timeout(50)


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, WCAG 2.2."""
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@contextmanager
def load(server: RunningServer, path: str, body: bytes, clients: int = 4) -> Generator[None]:
    """Send requests from a few clients in a closed loop."""
    over = threading.Event()

    def ask() -> None:
        connection = HTTPConnection(server.host, server.port, timeout=10)
        while not over.is_set():
            connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
            connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
