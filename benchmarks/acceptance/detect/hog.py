"""The classical peer of the detector: HOG in windows of all sizes, with a linear classifier for each kind of window.

Dalal and Triggs 2005, "Histograms of oriented gradients for human detection", with one round of hard negatives as in
its section 4.
"""

from typing import Any

import numpy as np
from PIL import Image

from benchmarks.acceptance.detect.coco_map import Found, coco_map50
from penstock.apps.detect.drawn import LabelledPictures, drawn_set
from penstock.apps.detect.precision import iou
from penstock.core.spec import Array

# H height, W width, F features, n windows

TRAIN_SCENES, TEST_SCENES = 300, 100
CELL, ORIENTATIONS, BLOCK = 8, 9, 2
# Class and cells of each window: a car has one for its end and one for its side.
WINDOWS = ((0, 6, 7), (0, 5, 12), (1, 12, 5), (2, 6, 6), (3, 9, 4))
SCALES = (4.0, 2.8, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35)
# A box belongs to a window if its sides have the window's ratio within this factor.
RATIO = 1.5
MARGIN = 1.15
NEGATIVES_A_SCENE, HARD_SCENES, HARD_A_SCENE = 12, 100, 20
STRENGTH = 0.01
OVERLAP, KEPT = 0.4, 100


def map50() -> list[float]:
    """Return the mAP50 of HOG with linear windows on held-out scenes."""
    models = train_windows(drawn_set("train", TRAIN_SCENES))
    return [coco_map50(drawn_set("test", TEST_SCENES), lambda pixels: [find(models, one) for one in pixels])]


def train_windows(pictures: LabelledPictures) -> list[tuple[Array, float]]:
    """Fit a linear classifier for each window; returns weights `[F]` and a bias for each."""
    rng, models = np.random.default_rng(0), list[tuple[Array, float]]()
    greys = [_grey(pixels) for pixels in pictures.pixels]
    for window in WINDOWS:
        positive = [
            _window_features(grey, box, window)
            for grey, boxes, classes in zip(greys, pictures.boxes, pictures.classes, strict=True)
            for box in boxes[(classes == window[0]) & _fits(boxes, window)]
        ]
        negative = [
            _window_features(grey, box, window)
            for grey, boxes, classes in zip(greys, pictures.boxes, pictures.classes, strict=True)
            for box in _elsewhere(rng, boxes[classes == window[0]], grey.shape, window)
        ]
        model = _fitted(positive, negative)
        for at in range(HARD_SCENES):
            mine = pictures.boxes[at][pictures.classes[at] == window[0]]
            boxes, _ = _windows(model, greys[at], window)
            wrong = boxes[iou(boxes, mine).max(1, initial=0.0) < 0.3][:HARD_A_SCENE] if len(boxes) else boxes
            negative += [_window_features(greys[at], box, window, margin=1.0) for box in wrong]
        models.append(_fitted(positive, negative))
    return models


def find(models: list[tuple[Array, float]], pixels: Array) -> Found:
    """Find objects in a picture `[3, H, W]`."""
    grey = _grey(pixels)
    boxes, classes, scores = list[Array](), list[int](), list[float]()
    for kind in sorted({window[0] for window in WINDOWS}):
        own = [
            _windows(model, grey, window) for model, window in zip(models, WINDOWS, strict=True) if window[0] == kind
        ]
        every, score = (np.concatenate(parts) for parts in zip(*own, strict=True))
        for at in _suppressed(every, score):
            # Windows are larger than their objects by the margin.
            middle, half = (every[at, :2] + every[at, 2:]) / 2, (every[at, 2:] - every[at, :2]) / 2 / MARGIN
            boxes.append(np.concatenate([middle - half, middle + half]))
            classes.append(kind)
            scores.append(float(score[at]))
    order = np.argsort(-np.array(scores))[:KEPT]
    return np.array(boxes).reshape(-1, 4)[order], np.array(classes, np.int64)[order], np.array(scores)[order]


def _grey(pixels: Array) -> Array:
    return pixels.astype(np.float32).mean(0)


def _fits(boxes: Array, window: tuple[int, int, int]) -> Array:
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    ratio = (wide + 1e-6) / (high + 1e-6) / (window[2] / window[1])
    return (ratio < RATIO) & (ratio > 1 / RATIO)


def _hog(grey: Array) -> Array:
    from skimage.feature import hog

    return hog(
        grey,
        orientations=ORIENTATIONS,
        pixels_per_cell=(CELL, CELL),
        cells_per_block=(BLOCK, BLOCK),
        feature_vector=False,
    )


def _window_features(grey: Array, box: Array, window: tuple[int, int, int], margin: float = MARGIN) -> Array:
    _, rows, columns = window
    middle, half = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2 * margin
    area = tuple(float(each) for each in (*(middle - half), *(middle + half)))
    picture = Image.fromarray(grey).transform(
        (columns * CELL, rows * CELL), Image.Transform.EXTENT, area, Image.Resampling.BILINEAR
    )
    return _hog(np.asarray(picture)).ravel()


def _elsewhere(rng: Any, mine: Array, shape: tuple[int, ...], window: tuple[int, int, int]) -> Array:
    high = np.exp(rng.uniform(np.log(8), np.log(160), NEGATIVES_A_SCENE))
    wide = high * window[2] / window[1]
    left, top = rng.uniform(0, shape[1], len(high)) - wide / 2, rng.uniform(0, shape[0], len(high)) - high / 2
    boxes = np.stack([left, top, left + wide, top + high], 1)
    return boxes[iou(boxes, mine).max(1, initial=0.0) < 0.3]


def _fitted(positive: list[Array], negative: list[Array]) -> tuple[Array, float]:
    from sklearn.svm import LinearSVC

    features = np.array(positive + negative, np.float32)
    labels = np.arange(len(features)) < len(positive)
    made: Any = LinearSVC(C=STRENGTH, class_weight="balanced").fit(features, labels)
    return made.coef_[0].astype(np.float32), float(made.intercept_[0])


def _windows(model: tuple[Array, float], grey: Array, window: tuple[int, int, int]) -> tuple[Array, Array]:
    """Boxes `[n, 4]` and scores `[n]` of the windows with a score above -1, the largest first."""
    weights, bias = model
    _, rows, columns = window
    shape = (rows - BLOCK + 1, columns - BLOCK + 1, BLOCK, BLOCK, ORIENTATIONS)
    boxes, scores = [np.zeros((0, 4))], [np.zeros(0)]
    for scale in SCALES:
        size = round(grey.shape[1] * scale), round(grey.shape[0] * scale)
        if size[0] < columns * CELL or size[1] < rows * CELL:
            continue
        blocks = _pyramid_level(grey, size)
        view = np.lib.stride_tricks.sliding_window_view(blocks, shape[:2], (0, 1))
        # The window's rows and columns come last.
        score = np.tensordot(view, weights.reshape(shape).transpose(2, 3, 4, 0, 1), 5) + bias
        at = np.argwhere(score > -1)
        corner = at[:, ::-1] * CELL / scale
        boxes.append(np.concatenate([corner, corner + np.array([columns, rows]) * CELL / scale], 1))
        scores.append(score[at[:, 0], at[:, 1]])
    every, score = np.concatenate(boxes), np.concatenate(scores)
    order = np.argsort(-score)[:1000]
    return every[order], score[order]


_levels: dict[tuple[bytes, tuple[int, int]], Array] = {}


def _pyramid_level(grey: Array, size: tuple[int, int]) -> Array:
    """HOG of a scaled picture; that of the last picture is kept for its other windows."""
    key = (grey[::16, ::16].tobytes(), size)
    if key not in _levels:
        if _levels and next(iter(_levels))[0] != key[0]:
            _levels.clear()
        _levels[key] = _hog(np.asarray(Image.fromarray(grey).resize(size, Image.Resampling.BILINEAR)))
    return _levels[key]


def _suppressed(boxes: Array, scores: Array) -> list[int]:
    """Indices of boxes that overlap no better one."""
    kept: list[int] = []
    for at in np.argsort(-scores).tolist():
        if not kept or iou(boxes[at : at + 1], boxes[kept]).max() < OVERLAP:
            kept.append(at)
        if len(kept) == KEPT:
            break
    return kept
