"""What is seen, in a terminal: the picture in coloured half blocks beside what is shown, or a line where it changes."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from penstock.core.spec import Array
from penstock.device.watch import Seen
from penstock.device.words import line_of

# More often nobody reads it, and drawing takes time from the network.
DRAWS_A_SECOND = 8.0
COLUMNS = 56
BAR = 24


class View(ABC):
    """Shows what is seen; to be used as a context."""

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def show(self, seen: Seen) -> None:
        """What came of one more frame."""


@final
class Silent(View):
    """Shows nothing."""

    def show(self, seen: Seen) -> None:
        """Nothing."""


@final
class Lines(View):
    """A line where what is shown changes, and for each picture of a folder.

    Args:
        say: Called with each line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: tuple[Any, Any] | None = None

    def show(self, seen: Seen) -> None:
        """A line, if there is something new."""
        now = (seen.shown["group"], seen.shown["label"])
        if seen.frame.name:
            self._say(f"{seen.frame.name}: {line_of(seen.shown)}")
        elif now != self._last:
            self._say(f"{seen.frame.time_s:8.2f} s  {line_of(seen.shown)}")
        self._last = now


@final
class Terminal(View):
    """The picture, what is shown and the likeliest labels, drawn a few times a second.

    Args:
        console: Of the terminal.
        clock: Seconds that only go forward.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._clock = clock
        self._drawn_s = float("-inf")
        self._since_s = clock()
        self._count = 0

    def __enter__(self) -> "Terminal":
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(None, None, None)

    def show(self, seen: Seen) -> None:
        """Draw it, if the last drawing is long enough ago."""
        self._count += 1
        now_s = self._clock()
        passed_s = now_s - self._drawn_s
        if passed_s < 1 / DRAWS_A_SECOND:
            return
        rate = self._count / (now_s - self._since_s) if now_s > self._since_s else 0.0
        self._since_s, self._count, self._drawn_s = now_s, 0, now_s
        self._live.update(screen_of(seen, rate), refresh=True)


def screen_of(seen: Seen, rate: float) -> Group:
    """What the terminal shows of a frame.

    Args:
        seen: The frame and what is shown with it.
        rate: Frames that were looked at in a second.
    """
    colour = "yellow" if seen.shown["unsure"] else "green"
    likeliest = Table.grid(padding=(0, 1))
    for label, probability in seen.shown["top"]:
        bar = Text("█" * round(probability * BAR), style="cyan")
        likeliest.add_row(Text(label), Text(f"{probability:4.0%}"), bar)
    age = "" if seen.age_s is None else f", {1e3 * seen.age_s:.0f} ms old"
    figures = Text(f"{rate:.1f} frames/s, network {1e3 * seen.model_s:.1f} ms{age}", style="dim")
    return Group(HalfBlocks(seen.pixels), Text(line_of(seen.shown), style=f"bold {colour}"), likeliest, figures)


@final
class HalfBlocks:
    """A small picture: two pixels a character, one above the other.

    Args:
        pixels: RGBA `[H, W, 4]`.
        columns: Its width in characters at most.
    """

    def __init__(self, pixels: Array, columns: int = COLUMNS) -> None:
        self._pixels = pixels
        self._columns = columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rows of half blocks."""
        height, width = self._pixels.shape[:2]
        columns = min(self._columns, options.max_width, width)
        # Characters are twice as high as they are wide; of a tall picture less width is taken.
        rows = max(round(columns * height / width / 2), 1)
        most_rows = max((options.height or 40) - 12, 4)
        if rows > most_rows:
            columns, rows = max(round(columns * most_rows / rows), 1), most_rows
        down = (2 * rows, columns)
        y = ((2 * i + 1) * height // (2 * down[0]) for i in range(down[0]))
        x = [(2 * i + 1) * width // (2 * columns) for i in range(columns)]
        # 32 levels are enough here, and styles are kept by colour.
        small = (self._pixels[list(y)][:, x, :3] & 0xF8).tolist()
        for row in range(rows):
            for upper, lower in zip(small[2 * row], small[2 * row + 1], strict=True):
                yield Segment("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
            yield Segment.line()
