"""Train the perceptron with each activation and both losses, and draw all curves in one picture.

python examples/textbook/curves.py [--epochs 60] [--out runs/textbook-curves] [--picture docs/assets/textbook.png]
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.models.mlp import ACTIVATIONS
from penstock.train.report.run_log import read_metrics
from penstock.train.run import train

HERE = Path(__file__).parent
LOSSES = ("cross_entropy", "mean_square")


def main() -> None:
    """Eight short runs and a picture."""
    parser = argparse.ArgumentParser(description="The textbook's activations and losses in one picture.")
    parser.add_argument("--epochs", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/textbook-curves"))
    parser.add_argument("--picture", type=Path, default=HERE.parents[1] / "docs" / "assets" / "textbook.png")
    given = parser.parse_args()
    found = find_application(str(HERE / "app.py"))
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for loss in LOSSES:
        for activation in ACTIVATIONS:
            run = given.out / f"{loss}-{activation}"
            recipe = replace(found.recipe(), epochs=given.epochs, loss=getattr(found.module, loss))
            result = train(_with(found, activation), run, recipe, overrides={}, quiet=True)
            curves[loss, activation] = read_metrics(run)
            print(
                f"{loss:14} {activation:8} held-out accuracy {result.metrics['accuracy']:.4f} in {result.seconds:.1f} s"
            )
    print(f"Curves: {draw(curves, given.picture)}")


def draw(curves: dict[tuple[str, str], list[dict[str, Any]]], picture: Path) -> Path:
    """Held-out error over the steps of training, a panel for each loss and a line for each activation."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, loss in zip(figure.subplots(1, 2, sharey=True), LOSSES, strict=True):
        for activation in ACTIVATIONS:
            lines = curves[loss, activation]
            error = [max(1 - line["validation_accuracy"], 1e-3) for line in lines]
            axes.plot([line["step"] for line in lines], error, label=activation, linewidth=1.4)
        axes.set_yscale("log")
        axes.set_title(loss.replace("_", "-"))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out error")
    figure.axes[0].legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    return picture


def _with(found: FoundApplication, activation: str) -> FoundApplication:
    network = partial(found.module.network, activation)
    return replace(found, application=replace(found.application, model=network))


if __name__ == "__main__":
    main()
