"""The runs below a folder, compared: what they reached, how long it took, and when they passed a given accuracy."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import TrainError
from penstock.train.report import RUN_FILE, read_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run folder as read.

    Args:
        folder: Where it is.
        fields: Its run.json.
        lines: Its metrics, a validation each.
    """

    folder: Path
    fields: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far."""
        return self.fields.get("seconds") or (self.lines[-1]["seconds"] if self.lines else None)

    def best(self, name: str) -> float | None:
        """The best value of a metric: the smallest of a loss, the largest of others; of its own as the recipe says."""
        values = [line[name] for line in self.lines if name in line]
        if not values:
            return None
        recipe = self.fields.get("recipe", {})
        if name != f"validation_{recipe.get('best')}":
            return min(values) if name.endswith("loss") else max(values)
        return max(values) if recipe.get("best_mode") == "max" else min(values)

    def seconds_to(self, name: str, value: float) -> float | None:
        """Seconds of training until a metric first reached a value, or fell to it for a loss; None if it never did."""
        sign = -1 if name.endswith("loss") else 1
        reached = (line["seconds"] for line in self.lines if name in line and sign * line[name] >= sign * value)
        return next(reached, None)


def read_run(folder: Path) -> Run:
    """One run.

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
    """Every run in a folder or below it, in the order of their paths.

    Raises:
        TrainError: There is none.
    """
    runs = [read_run(file.parent) for file in sorted(folder.glob(f"**/{RUN_FILE}"))]
    if not runs:
        raise TrainError(
            f"there is no run in {folder} or below it; 'penstock train APP --out {folder}/NAME' makes one."
        )
    return runs
