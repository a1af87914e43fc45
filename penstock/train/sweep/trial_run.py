"""The run of a trial: the ordinary training command in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.core.errors import TrainError
from penstock.train.overrides import setting_text
from penstock.train.parallel.rank_process import PARENT_VARIABLE, last_words
from penstock.train.report.run_comparison import read_run
from penstock.train.report.run_log import METRICS_FILE, RUN_FILE, read_metrics, writing

LOG_FILE = "train.log"
# Bytes of the log that the error of a run is looked for in.
LOG_END = 4096
SENTENCE = "penstock: "


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything that starts the run of a trial.

    Args:
        application: The application, as the command names it.
        folder: The run's folder.
        settings: All settings, by name.
        options: Further options of `penstock train`.
        environment: Variables beside those of this process.
        keeps: A file descriptor that the run keeps open until it ends.
    """

    application: str
    folder: Path
    settings: Mapping[str, Any]
    options: Sequence[str]
    environment: Mapping[str, str]
    keeps: int

    def command(self) -> list[str]:
        """Return the command: one that goes on with the run in the folder, if there is one."""
        start = [sys.executable, "-m", "penstock", "train"]
        if (self.folder / RUN_FILE).exists():
            return [*start, "--resume", str(self.folder), *self.options]
        return [*start, self.application, "--out", str(self.folder), *set_options(self.settings), *self.options]


def set_options(settings: Mapping[str, Any]) -> list[str]:
    """Return `--set` options for settings by name."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={setting_text(value)}")]


@final
class TrialRun:
    """A running training of a trial.

    Args:
        number: The trial's number.
        plan: What to run.
        metric: The metric that the trials are compared by.
        seen: Validations of the run that were reported before.

    Attributes:
        is_stopped: True after `stop`.

    Raises:
        TrainError: The folder cannot be written, or no process can be started.
    """

    def __init__(self, number: int, plan: RunPlan, metric: str, seen: int = 0) -> None:
        self.number, self.is_stopped = number, False
        self._plan, self._metric, self._seen = plan, metric, seen
        self._size = -1
        with writing(plan.folder):
            plan.folder.mkdir(exist_ok=True)
            with (plan.folder / LOG_FILE).open("ab") as log:
                # A group of its own: Ctrl-C reaches the sweep, which stops its runs once.
                self._process = subprocess.Popen(
                    plan.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **plan.environment, PARENT_VARIABLE: str(os.getpid())},
                    pass_fds=(plan.keeps,),
                    process_group=0,
                )

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def validations(self) -> list[tuple[int, float, bool]]:
        """Return the new validations: number from 1, value of the metric, and whether it is the last of the run."""
        file = self._plan.folder / METRICS_FILE
        size = file.stat().st_size if file.exists() else 0
        if size == self._size:
            return []
        self._size = size
        lines, seen = read_metrics(self._plan.folder), self._seen
        new = lines[seen:]
        # A run that goes on writes the lines after its checkpoint again.
        self._seen = max(seen, len(lines))
        total = read_run(self._plan.folder).fields.get("total_steps") if new else None
        return [
            (number, float(line[f"validation_{self._metric}"]), line["step"] == total)
            for number, line in enumerate(new, start=seen + 1)
        ]

    def stop(self) -> None:
        """Ask the run to stop: it writes a checkpoint and the bundle of the best weights so far."""
        if not self.has_ended and not self.is_stopped:
            self._process.send_signal(signal.SIGTERM)
        self.is_stopped = True

    def kill(self) -> None:
        """End the process at once, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def result(self) -> float | None:
        """Return the best value of the metric of a run that is finished; None of another one."""
        try:
            fields = read_run(self._plan.folder).fields
        except TrainError:
            return None
        if fields.get("state") != "finished":
            return None
        return float(fields["metrics"][self._metric])

    def failure(self) -> str:
        """Return the reason why an ended process has no result."""
        status = self._process.wait()
        log = self._plan.folder / LOG_FILE
        lines = [line for line in log.read_bytes()[-LOG_END:].decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith(SENTENCE)), None)
        if said is not None and status > 0:
            return said.removeprefix(SENTENCE)
        if status == -signal.SIGKILL:
            return f"the process was killed, as the system does when memory is full; {log} has its output"
        if status < 0:
            return f"the process was ended by {signal.Signals(-status).name}; {log} has its output"
        return f"the process ended with status {status}: {last_words(lines) or 'no output'}"
