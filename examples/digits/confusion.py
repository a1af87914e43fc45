"""Which digits are taken for which: the confusion matrices of a short and of a whole training, beside one another.

python examples/digits/confusion.py [--epochs 1 --epochs 60] [--picture docs/assets/confusion.png]
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

import penstock
from penstock.apps.digits.recipe import digits
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.train.data.examples import ArraySet
from penstock.train.run import train

ROOT = Path(__file__).parents[2]

# K classes


def main() -> None:
    """Train, predict the test set and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, action="append")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "assets" / "confusion.png")
    given = parser.parse_args()
    matrices = {epochs: confusion_of(epochs) for epochs in given.epochs or [1.0, 60.0]}
    for epochs, matrix_KK in matrices.items():
        wrong = int(matrix_KK.sum() - np.trace(matrix_KK))
        print(f"{epochs:g} epochs: {wrong} of {matrix_KK.sum()} held-out digits are taken for another one")
    print(f"Confusion: {draw(matrices, given.picture)}")


def confusion_of(epochs: float) -> Array:
    """Train the digits and count each digit's predictions on the test set, `[K, K]`: rows are the true ones."""
    found = find_application("digits")
    test = digits().test
    assert isinstance(test, ArraySet)
    assert isinstance(test.inputs, np.ndarray)
    with TemporaryDirectory() as folder:
        run = train(found, Path(folder) / "run", replace(found.recipe(), epochs=epochs), overrides={}, quiet=True)
        predictor = penstock.load(run.folder / "bundle")
        scores = predictor.predict(test.inputs)
    return confusion_matrix(test.targets, np.asarray(scores).argmax(1))


def draw(matrices: dict[float, Array], picture: Path) -> Path:
    """Draw the matrices beside one another."""
    figure = Figure(figsize=(4.6 * len(matrices), 4.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(matrices)))
    for axes, (epochs, matrix_KK) in zip(panels, matrices.items(), strict=True):
        ConfusionMatrixDisplay(matrix_KK).plot(ax=axes, cmap="Blues", colorbar=False)
        right = np.trace(matrix_KK) / matrix_KK.sum()
        axes.set_title(f"{epochs:g} epoch{'s' * (epochs != 1)}: {right:.1%} right")
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    return picture


if __name__ == "__main__":
    main()
