"""Results in a terminal: the picture in half blocks with its answer, or a line whenever the answer changes."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from PIL import Image, ImageDraw
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from penstock.core.pictures.boxes import FoundBox
from penstock.core.recognition import TOP
from penstock.core.spec import Array
from penstock.device.captions import answer_key, answer_line
from penstock.device.drawn_boxes import colour_of, corners
from penstock.device.watch import FrameAnswer, FrameResult

# Drawing takes time from the network.
DRAWS_PER_SECOND = 8.0
COLUMNS = 56
BAR = 24


@final
class LineView:
    """Print a line whenever the answer changes, and for each picture of a folder.

    Args:
        print_line: Called with each line.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line
        self._last: Any = None

    def show(self, result: FrameResult) -> None:
        """Print a line if the answer changed."""
        now = answer_key(result.answer)
        if result.frame.name:
            self._print(f"{result.frame.name}: {answer_line(result.answer)}")
        elif now != self._last:
            self._print(f"{result.frame.time_s:8.2f} s  {answer_line(result.answer)}")
        self._last = now


@final
class TerminalView:
    """Draw the picture, its answer and the likeliest labels or boxes a few times per second; to be used as a context.

    Args:
        console: The terminal.
        clock: Monotonic seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._clock = clock
        self._drawn_s = float("-inf")
        self._since_s = clock()
        self._count = 0

    def __enter__(self) -> "TerminalView":
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(None, None, None)

    def show(self, result: FrameResult) -> None:
        """Draw the result, unless the last drawing is too recent."""
        self._count += 1
        now_s = self._clock()
        passed_s = now_s - self._drawn_s
        if passed_s < 1 / DRAWS_PER_SECOND:
            return
        rate = self._count / (now_s - self._since_s) if now_s > self._since_s else 0.0
        self._since_s, self._count, self._drawn_s = now_s, 0, now_s
        self._live.update(render(result, rate), refresh=True)


def render(result: FrameResult, rate: float) -> Group:
    """A result as the terminal shows it.

    Args:
        result: The frame and its answer.
        rate: Frames processed per second.
    """
    answer = result.answer
    found = answer if isinstance(answer, tuple) else ()
    colour = "green" if _is_sure(answer) else "yellow"
    likeliest = Table.grid(padding=(0, 1))
    top = [(each.label, each.score) for each in answer[:TOP]] if isinstance(answer, tuple) else answer["top"]
    for label, probability in top:
        bar = Text("█" * round(probability * BAR), style="cyan")
        likeliest.add_row(Text(label), Text(f"{probability:4.0%}"), bar)
    age = "" if result.age_s is None else f", {1e3 * result.age_s:.0f} ms old"
    figures = Text(f"{rate:.1f} frames/s, network {1e3 * result.model_s:.1f} ms{age}", style="dim")
    line = Text(answer_line(answer), style=f"bold {colour}")
    return Group(HalfBlocks(result.pixels, found), line, likeliest, figures)


def _is_sure(answer: FrameAnswer) -> bool:
    return bool(answer) if isinstance(answer, tuple) else not answer["unsure"]


@final
class HalfBlocks:
    """A small picture: two pixels per character, one above the other.

    Args:
        pixels: RGBA `[H, W, 4]`.
        found: Boxes in its pixels, the largest score first.
    """

    def __init__(self, pixels: Array, found: Sequence[FoundBox] = ()) -> None:
        self._pixels = pixels
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = self._pixels.shape[:2]
        columns = min(COLUMNS, options.max_width, width)
        # Characters are twice as high as wide; a tall picture is drawn narrower.
        rows = max(round(columns * height / width / 2), 1)
        max_rows = max((options.height or 40) - 12, 4)
        if rows > max_rows:
            columns, rows = max(round(columns * max_rows / rows), 1), max_rows
        picture = Image.fromarray(self._pixels[..., :3]).resize((columns, 2 * rows), Image.Resampling.NEAREST)
        draw = ImageDraw.Draw(picture)
        for each in reversed(self._found):
            left, top, right, bottom = corners(each, width, height)
            across, down = (columns - 1) / width, (2 * rows - 1) / height
            draw.rectangle((left * across, top * down, right * across, bottom * down), outline=colour_of(each))
        # 32 levels per channel, because styles are cached by colour.
        small = (np.asarray(picture) & 0xF8).tolist()
        for row in range(rows):
            for upper, lower in zip(small[2 * row], small[2 * row + 1], strict=True):
                yield Segment("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
            yield Segment.line()
