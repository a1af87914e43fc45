"""Learned against hand-made features: the same split and linear classifier.

HOG: Dalal and Triggs 2005, "Histograms of oriented gradients for human detection". Its settings and the classifier's
regularisation are chosen by cross-validation on the training part; so is the classifier of the learned embedding. The
network is trained on the training part only.
"""

from itertools import product
from typing import Any

import numpy as np

from benchmarks.acceptance.report.results import ROOT
from benchmarks.acceptance.train.training_run import SEEDS, trained
from penstock.core.errors import BenchError
from penstock.core.spec import Array

# n pictures, F features

STRENGTHS = (0.1, 1.0, 10.0, 100.0)
FOLDS = 3
PICTURE = ROOT / "docs" / "assets" / "features.png"


def learned_vs_hog() -> list[float]:
    """Train the digits network with each seed, compare its embedding with HOG, and draw the comparison.

    Returns:
        HOG's errors on the held-out third over the embedding's, for each seed; no error counts as half of one.

    Raises:
        BenchError: HOG makes no error, which leaves no ratio.
    """
    from penstock.apps.digits.recipe import HELD_OUT, digit_images, split

    images, labels = digit_images()
    train, held_out = split(labels, HELD_OUT)
    hog = _best_hog(images, labels, train)
    hog_errors = _errors(hog, labels, train, held_out)
    if not hog_errors:
        raise BenchError("HOG makes no error on this split; there is no ratio.")
    embeddings = [_embedded(images, seed) for seed in SEEDS]
    learned_errors = [_errors(embedding, labels, train, held_out) for embedding in embeddings]
    _draw(hog[held_out], embeddings[0][held_out], labels[held_out], hog_errors, learned_errors)
    return [hog_errors / max(errors, 0.5) for errors in learned_errors]


def _best_hog(images: Array, labels: Array, train: Array) -> Array:
    from skimage.feature import hog

    candidates = [
        np.stack(
            [
                hog(image, orientations=orientations, pixels_per_cell=(cell, cell), cells_per_block=(block, block))
                for image in images
            ]
        )
        for cell, orientations, block in product((4, 7), (8, 12), (1, 2))
    ]
    return max(
        candidates,
        key=lambda features: max(_score(features[train], labels[train], strength) for strength in STRENGTHS),
    )


def _errors(features: Array, labels: Array, train: Array, held_out: Array) -> int:
    strength = max(STRENGTHS, key=lambda strength: _score(features[train], labels[train], strength))
    classifier = _classifier(strength).fit(features[train], labels[train])
    return int((classifier.predict(features[held_out]) != labels[held_out]).sum())


def _score(features: Array, labels: Array, strength: float) -> float:
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    return float(cross_val_score(_classifier(strength), features, labels, cv=folds).mean())


def _classifier(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(with_std=False), LogisticRegression(C=strength, max_iter=2000))


def _embedded(images: Array, seed: int) -> Array:
    import torch

    from penstock import load

    with trained("digits", "--seed", str(seed)) as run:
        module: Any = load(run.bundle).module
    with torch.inference_mode():
        return module.embed(torch.from_numpy(images)).numpy()


def _draw(hog: Array, learned: Array, labels: Array, hog_errors: int, learned_errors: list[int]) -> None:
    from matplotlib.figure import Figure
    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    figure = Figure(figsize=(11, 3.8), layout="constrained", facecolor="white")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for axes, features, title in ((left, hog, "hand-made: HOG"), (middle, learned, "learned: the network's embedding")):
        reduced = PCA(min(30, features.shape[1]), random_state=0).fit_transform(features)
        points = LinearDiscriminantAnalysis(n_components=2).fit_transform(reduced, labels)
        for digit in range(10):
            axes.scatter(*points[labels == digit].T, s=6, color=f"C{digit}", label=str(digit))
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    middle.legend(fontsize=7, markerscale=2, loc="center left", bbox_to_anchor=(1, 0.5))
    percent = 100 / len(labels)
    learned_percent = sorted(errors * percent for errors in learned_errors)
    median = float(np.median(learned_percent))
    right.bar(["HOG", "embedding"], [hog_errors * percent, median], color=["0.6", "C0"], width=0.6)
    right.vlines(1, learned_percent[0], learned_percent[-1], color="black", linewidth=1)
    right.set_title(f"errors of a linear classifier, %\n({len(labels)} digits held out)", fontsize=10)
    figure.savefig(PICTURE, dpi=110)
