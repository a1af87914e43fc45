"""Mean average precision of boxes by pycocotools, on drawn scenes that are never learned from or chosen by."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.acceptance.train.training_run import trained
from penstock.apps.detect.app import LABELS
from penstock.apps.detect.drawn import LabelledPictures, drawn_set
from penstock.core.spec import Array

# n objects

SCENES = 400
TRAIN_CPU_S = 1_200
AT_ONCE = 8
# Boxes, classes and scores of one picture, `[n, 4]`, `[n]` and `[n]`.
Found = tuple[Array, Array, Array]


def map50() -> list[float]:
    """Train the detector; return its mAP50 on held-out scenes."""
    return [_both()[0]]


def map50_other() -> list[float]:
    """Return the mAP50 of the same detector on scenes of other shapes and colours."""
    return [_both()[1]]


@cache
def _both() -> tuple[float, float]:
    with trained("detect", limit_cpu_s=TRAIN_CPU_S) as run:
        default, other = (map50_of(run.bundle, world) for world in ("default", "other"))
        return default, other


def map50_of(bundle: Path, world: str, scenes: int = SCENES) -> float:
    """Return the mAP50 of a bundle on the test scenes of a world."""
    from penstock.runtime.load import load

    pictures, predictor = drawn_set("test", scenes, world), load(bundle)

    def find(pixels: Array) -> list[Found]:
        answers = predictor.predict(pixels.astype("float32"))
        return [(one["boxes"], one["classes"], one["scores"]) for one in answers]

    return coco_map50(pictures, find)


def coco_map50(pictures: LabelledPictures, find: Callable[[Array], list[Found]]) -> float:
    """Return the mAP50 of a function of some pictures."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found: list[Found] = []
    for start in range(0, len(pictures.pixels), AT_ONCE):
        found += find(pictures.pixels[start : start + AT_ONCE])
    # It reports by print.
    with redirect_stdout(io.StringIO()):
        # Its types say less than it takes.
        truth: Any = COCO()
        truth.dataset = _dataset(pictures)
        truth.createIndex()
        rows = _results(found)
        if not rows:
            return 0.0
        evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def _dataset(pictures: LabelledPictures) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for image, (boxes, classes) in enumerate(zip(pictures.boxes, pictures.classes, strict=True), start=1):
        for box, kind in zip(boxes[classes >= 0].tolist(), classes[classes >= 0].tolist(), strict=True):
            area = (box[2] - box[0]) * (box[3] - box[1])
            one = {"id": len(annotations) + 1, "image_id": image, "category_id": kind + 1, "bbox": _as_coco(box)}
            annotations.append(one | {"area": area, "iscrowd": 0})
    return {
        "info": {},
        "images": [{"id": image + 1} for image in range(len(pictures.pixels))],
        "categories": [{"id": kind + 1, "name": name} for kind, name in enumerate(LABELS)],
        "annotations": annotations,
    }


def _results(found: list[Found]) -> list[dict[str, Any]]:
    return [
        {"image_id": image, "category_id": int(kind) + 1, "bbox": _as_coco(box.tolist()), "score": float(score)}
        for image, one in enumerate(found, start=1)
        for box, kind, score in zip(*one, strict=True)
    ]


def _as_coco(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]
