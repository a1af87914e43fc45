"""Comparison of the runs below a folder: metrics of the best weights, training time, and time to a metric value."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import TrainError
from penstock.train.report.run_log import RUN_FILE, read_metrics
from penstock.train.run_owner import is_abandoned


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Contents of a run folder.

    Args:
        folder: Path of the folder.
        fields: Its run.json.
        lines: Its metrics, one record per validation.
    """

    folder: Path
    fields: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def state(self) -> str | None:
        """The state in run.json; `"died"` for a run that is `"running"` there and that no process trains."""
        state = self.fields.get("state")
        return "died" if state == "running" and is_abandoned(self.folder) else state

    @property
    def reason(self) -> str | None:
        """The error that ended a failed run; None for other runs."""
        return self.fields.get("reason") if self.state == "failed" else None

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far."""
        return self.fields.get("seconds") or (self.lines[-1]["seconds"] if self.lines else None)

    def best(self, name: str) -> float | None:
        """Value of a metric with the best weights, those of the bundle; None if no validation has it.

        Of a run that does not record how it selects weights, the minimum (losses) or maximum.
        """
        recipe = self.fields.get("recipe", {})
        chosen = f"validation_{recipe.get('selection.metric')}"
        lines = [line for line in self.lines if chosen in line]
        if lines:
            # Of equal values the first, as in the training.
            choose = max if recipe.get("selection.mode") == "max" else min
            return choose(lines, key=lambda line: line[chosen]).get(name)
        values = [line[name] for line in self.lines if name in line]
        return (min if _is_loss(name) else max)(values, default=None)

    def seconds_to(self, name: str, value: float) -> float | None:
        """Seconds of training until a metric first reached a value, or fell to it for a loss; None if it never did."""
        sign = -1 if _is_loss(name) else 1
        reached = (line["seconds"] for line in self.lines if name in line and sign * line[name] >= sign * value)
        return next(reached, None)


def _is_loss(name: str) -> bool:
    """True for a loss, and for a part of one, such as `validation_loss.box`."""
    return name.endswith("loss") or name.startswith("validation_loss.")


def read_run(folder: Path) -> Run:
    """Read one run.

    Raises:
        TrainError: The folder holds no run.
    """
    try:
        fields = json.loads((folder / RUN_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise TrainError(f"{folder} holds no run (no {RUN_FILE}); 'penstock train APP --out RUN' makes one.") from None
    except ValueError as error:
        raise TrainError(f"{folder / RUN_FILE} is not JSON ({error}); the run cannot be read.") from None
    return Run(folder=folder, fields=fields, lines=read_metrics(folder))


def find_runs(folder: Path) -> list[Run]:
    """Read all runs in a folder or below it, sorted by path.

    Raises:
        TrainError: There is no run.
    """
    runs = [read_run(file.parent) for file in sorted(folder.glob(f"**/{RUN_FILE}"))]
    if not runs:
        raise TrainError(
            f"there is no run in {folder} or below it; 'penstock train APP --out {folder}/NAME' makes one."
        )
    return runs


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings of each run: those that its command gave, and those in which runs of one name differ."""
    found: list[str] = []
    for run in runs:
        recipes = [
            other.fields.get("recipe", {}) for other in runs if other.fields.get("name") == run.fields.get("name")
        ]
        own = run.fields.get("recipe", {})
        differ = {
            name: value
            for name, value in own.items()
            if value is not None and any(other.get(name) != value for other in recipes)
        }
        # Those of the command first; the recipe has the values in use.
        shown = {**run.fields.get("overrides", {}), **differ}
        found.append(" ".join(f"{name}={value}" for name, value in shown.items()))
    return found
