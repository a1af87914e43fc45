"""What a training run says while it runs: a bar in a terminal, a line every few seconds elsewhere."""

import time
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 5.0


@final
class Progress:
    """Shows the step, the loss, samples a second, the best metrics so far and the time left.

    Args:
        name: What is trained.
        total: How many steps there are.
        done: How many were taken before.
        quiet: Show nothing.
    """

    def __init__(self, name: str, total: int, done: int, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet, soft_wrap=True, highlight=False)
        self._live = self._console.is_terminal and not quiet
        self._total, self._done, self._first = total, done, done
        self._metrics = ""
        self._loss = self._started = self._shown = 0.0
        self._samples = 0
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

    def advance(self, loss: float, samples: int) -> None:
        """One step was taken."""
        self._done += 1
        self._samples += samples
        # A single batch's loss jumps; what is shown is smoothed over some twenty.
        self._loss = loss if self._done == self._first + 1 else 0.95 * self._loss + 0.05 * loss
        now = time.monotonic()
        if self._live:
            self._bar.update(self._task, completed=self._done, info=self._info(now))
        elif now - self._shown > LINE_EVERY_S:
            self._shown = now
            self._console.print(f"Training {self._name}: {self._line()}")

    def note(self, metrics: dict[str, float]) -> None:
        """The best metrics so far."""
        self._metrics = " ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "loss")

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        self._console.print(sentence)

    def _info(self, now: float) -> str:
        rate = self._samples / max(now - self._started, 1e-9)
        return f"loss {self._loss:.4f}  {rate:,.0f} samples/s  {self._metrics}"

    def _line(self) -> str:
        now = time.monotonic()
        taken = max(self._done - self._first, 1)
        left_s = (now - self._started) / taken * (self._total - self._done)
        return f"step {self._done:,}/{self._total:,}  {self._info(now)}  {left_s:.0f} s left"
