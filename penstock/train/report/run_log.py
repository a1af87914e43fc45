"""Files of a run: written atomically, metrics read again, a picture of its curves."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.core.errors import TrainError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Translate errors of writing to a run folder.

    Args:
        folder: The run's folder.

    Raises:
        TrainError: A file cannot be written, for example because the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"{folder} cannot be written ({error.strerror or error}); free disk space or repair the folder, and resume "
            f"from the last checkpoint."
        ) from None


def replace_text(file: Path, text: str) -> None:
    """Write a file of a run atomically."""
    beside = file.with_name(f".{file.name}")
    with writing(file.parent):
        beside.write_text(text)
        beside.replace(file)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's metrics.jsonl; a last line that a crash truncated is ignored."""
    file = folder / METRICS_FILE
    lines: list[dict[str, Any]] = []
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def draw_runs(runs: dict[str, list[dict[str, Any]]], file: Path) -> Path:
    """Plot the curves of several runs, one panel per metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for lines in runs.values() for line in lines[:1] for name in line if name.startswith("validation_")]
    panels = ["train_loss", *dict.fromkeys(names)]
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, lines in runs.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, linewidth=1.4)
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if "loss" in name and any(line.get(name, 0) > 0 for lines in runs.values() for line in lines):
            axes.set_yscale("log")
    if len(runs) > 1:
        figure.axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)
    return file
