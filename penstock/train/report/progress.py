"""Progress of a training run: a bar in a terminal, a line every few seconds elsewhere."""

import time
from importlib.util import find_spec
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from penstock.train.report.throughput import Rate

LINE_EVERY_S = 5.0


@final
class Progress:
    """Show the step, the loss, samples a second, the best metrics so far and the time left.

    Args:
        name: Name of the application.
        total: Number of steps.
        done: Steps taken before this process.
        quiet: Show nothing.
    """

    def __init__(self, name: str, total: int, done: int, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet, soft_wrap=True, highlight=False)
        # In a notebook a bar is a widget.
        widgets = self._console.is_jupyter and find_spec("ipywidgets") is not None
        self._live = (self._console.is_terminal or widgets) and not quiet
        self._total, self._done, self._first = total, done, done
        self._metrics = ""
        self._loss = self._started = self._shown = 0.0
        self._rate = ""
        self._name = name
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(f"Training {name}", total=total, completed=done, info="")

    def __enter__(self) -> Self:
        self._started = self._shown = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._console.print(f"Training {self._name}: {self._line()}")

    def advance(self, loss: float, rate: Rate) -> None:
        """Count a step and show its loss and rate."""
        self._done += 1
        self._rate = rate.describe()
        # A single batch's loss is noisy; the loss shown is smoothed over about twenty.
        self._loss = loss if self._done == self._first + 1 else 0.95 * self._loss + 0.05 * loss
        now = time.monotonic()
        if self._live:
            self._bar.update(self._task, completed=self._done, info=self._info())
        elif now - self._shown > LINE_EVERY_S:
            self._shown = now
            self._console.print(f"Training {self._name}: {self._line()}")

    def note(self, metrics: dict[str, float]) -> None:
        """Set the best metrics so far."""
        self._metrics = " ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "loss")

    def notify(self, notice: str) -> None:
        """Print a line above the bar."""
        self._console.print(notice, markup=False)

    def _info(self) -> str:
        # No step was taken here yet: of a run that ends at once, or is finished.
        loss = f"loss {self._loss:.4f}" if self._done > self._first else ""
        return "  ".join(part for part in (loss, self._rate, self._metrics) if part)

    def _line(self) -> str:
        now = time.monotonic()
        taken = max(self._done - self._first, 1)
        left_s = (now - self._started) / taken * (self._total - self._done)
        step = f"step {self._done:,}/{self._total:,}"
        return "  ".join(part for part in (step, self._info(), f"{left_s:.0f} s left") if part)
