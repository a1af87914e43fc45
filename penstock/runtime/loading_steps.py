"""Progress of loading a model: which step runs now, and how long it took the last time."""

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Steps that were shorter are not worth a remark.
WORTH_TELLING_S = 1.0
# Steps that may take as long as an export, see `EXPORT_TIMEOUT_S`.
EXPORTING = "exporting the network to ONNX"
AWAITING_EXPORT = "waiting for another process that exports the network"


def _ignore(activity: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadingSteps:
    """Reports each step of loading to whoever waits for it.

    Args:
        report: Called with a description of each step as it begins, from any thread.
        durations: The folder in which the durations of steps are kept; None keeps none.
    """

    report: Callable[[str], None] = _ignore
    durations: Path | None = None

    @contextmanager
    def step(self, activity: str, model: str) -> Generator[None]:
        """Report a step, and keep its duration if it succeeds.

        Args:
            activity: What is done, such as `measuring batches`.
            model: The name of the application; a later version of it takes about as long.
        """
        self.report(activity + self.last_time(activity, model))
        start_s = time.monotonic()
        yield
        self._keep(activity, model, time.monotonic() - start_s)

    def last_time(self, activity: str, model: str) -> str:
        """Describe how long a step took the last time; empty if that is unknown or was short."""
        try:
            seconds = float(self._file(activity, model).read_text())
        except (OSError, ValueError):
            return ""
        return f" (it took {seconds:.0f} s last time)" if seconds >= WORTH_TELLING_S else ""

    def _keep(self, activity: str, model: str, seconds: float) -> None:
        # Of use to people alone: a cache that cannot be written is reported elsewhere.
        with suppress(OSError):
            file = self._file(activity, model)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{seconds:.3f}\n")

    def _file(self, activity: str, model: str) -> Path:
        if self.durations is None:
            raise FileNotFoundError
        step = re.sub(r"[^a-z0-9]+", "-", activity.lower())
        return self.durations / "durations" / f"{model}-{step}.s"
