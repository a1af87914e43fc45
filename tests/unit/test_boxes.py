"""The declaration of boxes: what it needs, and boxes in the pixels of a picture."""

import json
import math
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest

from penstock.apps.detect.app import app
from penstock.core.application import describe
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.pictures.boxes import Boxes, FoundBox, found_line
from penstock.core.spec import TensorSpec
from penstock.device.drawn_boxes import colour_of, corners

BOXES = Boxes(labels=("car", "person"), frame=(8, 16))
VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "boxes.json").read_text())


def outputs_of(rows: int) -> dict[str, TensorSpec]:
    return {
        "boxes": TensorSpec(dtype="float32", shape=(rows, 4), meaning="boxes"),
        "classes": TensorSpec(dtype="int64", shape=(rows,), meaning="classes"),
        "scores": TensorSpec(dtype="float32", shape=(rows,), meaning="scores"),
        "masks": TensorSpec(dtype="float32", shape=(2, rows), meaning="a mask for each"),
        "classes_seen": TensorSpec(dtype="float32", shape=(3,), meaning="not for each box"),
    }


NAMED = {
    "boxes": np.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 1, 1]], np.float32),
    "classes": np.array([1, 0, 1]),
    "scores": np.array([0.3, 0.29, 0.9], np.float32),
    "masks": np.array([[1, 2, 3], [4, 5, 6]], np.float32),
    "classes_seen": np.array([7, 8, 9], np.float32),
}


@pytest.mark.parametrize(("size", "share"), [((8, 16), 1), ((16, 16), 2), ((4, 40), 2.5), ((4, 8), 0.5)])
def test_boxes_are_in_the_pixels_of_the_picture(size: tuple[int, int], share: float) -> None:
    made = BOXES.in_picture(NAMED, *size, outputs_of(Dim("objects", max=3, min=0)))
    assert made["boxes"].tolist() == [[share, 2 * share, 3 * share, 4 * share], [0, 0, share, share]]
    assert made["boxes"].dtype == np.float32
    assert made["classes"].tolist() == [1, 1]
    assert made["masks"].tolist() == [[1, 3], [4, 6]]
    assert made["classes_seen"].tolist() == [7, 8, 9]
    assert len(NAMED["boxes"]) == 3


def test_without_a_frame_the_boxes_are_in_the_picture_already() -> None:
    shows = replace(BOXES, frame=None)
    made = shows.in_picture(NAMED, 999, 3, outputs_of(3))
    assert made["boxes"].tolist() == [[1, 2, 3, 4], [0, 0, 1, 1]]
    assert Boxes.from_json(shows.to_json()) == shows


@pytest.mark.parametrize(
    ("box", "rows", "columns"),
    [
        ((1.0, 0.0, 3.0, 2.0), [0, 1], [1, 2]),
        # Whole pixels that the box touches.
        ((0.9, 0.9, 1.1, 1.1), [0, 1], [0, 1]),
        # At an edge or beyond it, one pixel at least.
        ((-5.0, -5.0, 99.0, 99.0), [0, 1, 2], [0, 1, 2, 3]),
        ((9.0, 9.0, 12.0, 12.0), [2], [3]),
        ((-9.0, -9.0, -4.0, -4.0), [0], [0]),
        ((2.0, 1.0, 2.0, 1.0), [1], [2]),
        ((3.0, 2.0, 1.0, 0.0), [2], [3]),
        ((math.nan, -math.inf, math.nan, math.inf), [0, 1, 2], [0, 1, 2, 3]),
    ],
)
def test_a_crop_is_cut_within_the_picture(
    box: tuple[float, float, float, float], rows: list[int], columns: list[int]
) -> None:
    picture = np.arange(3 * 4 * 2).reshape(3, 4, 2)
    crop = FoundBox(label="a", kind=0, score=1.0, box=box).crop(picture)
    assert crop.tolist() == picture[np.ix_(rows, columns)].tolist()
    crop[:] = -1
    assert picture.min() == 0


def test_of_outputs_with_fixed_rows_only_the_three_lose_some() -> None:
    made = BOXES.in_picture(NAMED, 8, 16, outputs_of(3))
    assert (len(made["boxes"]), len(made["classes"]), len(made["scores"])) == (2, 2, 2)
    assert made["masks"].shape == (2, 3)


def test_a_picture_without_objects_has_empty_lists() -> None:
    none = {name: np.zeros(spec.shape, spec.dtype) for name, spec in outputs_of(3).items()}
    made = BOXES.in_picture(none, 8, 16, outputs_of(Dim("objects", max=3, min=0)))
    assert [made[name].tolist() for name in ("boxes", "classes", "scores")] == [[], [], []]


@pytest.mark.parametrize("example", VECTORS, ids=[each["name"] for each in VECTORS])
def test_what_is_found_is_the_same_as_in_a_browser(example: dict[str, Any]) -> None:
    shows = Boxes.from_json(example["shows"])
    named = {
        shows.boxes: np.array(example["boxes"], np.float32).reshape(-1, 4),
        shows.classes: np.array(example["classes"], np.int64),
        shows.scores: np.array(example["scores"], np.float32),
    }
    found = shows.found(named, example["height"], example["width"])
    assert [asdict(each) | {"box": list(each.box)} for each in found] == example["found"]
    assert found_line(found) == example["line"]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("labels", (), r"labels=\(\); it must be a tuple of names"),
        ("frame", (8, 0), r"frame=\(8, 0\); it must be a height and a width"),
        ("least", 2, "least=2; it must be 0 to 1"),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        replace(BOXES, **{field: value})


def test_an_application_has_the_outputs_and_a_prepare() -> None:
    assert app.shows is not None
    assert describe(app)["shows"]["frame"] == [256, 448]
    assert Boxes.from_json(app.shows.to_json()) == app.shows
    with pytest.raises(ApplicationError, match="'places' is no output"):
        replace(app, shows=replace(app.shows, boxes="places"))
    with pytest.raises(ApplicationError, match="and 'scores' is "):
        replace(app, shows=replace(app.shows, boxes="scores"))
    with pytest.raises(ApplicationError, match="boxes of a network are in a frame; give its height and width"):
        replace(app, shows=replace(app.shows, frame=None))
    with pytest.raises(ApplicationError, match="has shows, which needs a prepare"):
        replace(app, reply=lambda found: found)
    wrong: Any = "boxes"
    with pytest.raises(ApplicationError, match="has shows='boxes'; it must be a Boxes"):
        replace(app, shows=wrong)


DRAW = """
import { readFileSync } from "node:fs";
import { drawBox } from "./boxes.mjs";
const { boxes, width, height } = JSON.parse(readFileSync(0, "utf8"));
const drawn = [];
const context = {
  canvas: { width, height },
  measureText: () => ({ width: 1 }),
  fillRect() {},
  fillText() {},
  strokeRect(x, y, wide, high) { drawn.push([this.strokeStyle, x, y, x + wide, y + high]); },
};
for (const mirrored of [false, true]) {
  for (const { box, kind } of boxes) {
    drawBox(context, { label: "a", kind, score: 1, box: box.map(Number) }, [1, 1], mirrored);
  }
}
console.log(JSON.stringify(drawn));
"""


def test_a_browser_draws_the_same_corners(tmp_path: Path) -> None:
    node = which("node")
    if node is None:
        pytest.skip("there is no node here")
    width, height, nan, inf = 40, 30, math.nan, math.inf
    boxes = ((1, 2, 3, 4), (30, 20, 10, 5), (-9, -9, 99, 99), (99, 5, 50, 6), (-inf, 3, inf, 5), (nan, 1, 9, nan))
    found = [FoundBox(label="a", kind=kind - 3, score=1.0, box=box) for kind, box in enumerate(boxes)]
    sides = ((width - right, top, width - left, bottom) for left, top, right, bottom in boxes)
    mirrored = [replace(each, box=box) for each, box in zip(found, sides, strict=True)]
    for name in ("boxes", "dom"):
        source = (Path(__file__).parents[2] / f"penstock/device/web/{name}.js").read_text()
        (tmp_path / f"{name}.mjs").write_text(source.replace('.js";', '.mjs";'))
    (tmp_path / "run.mjs").write_text(DRAW)
    # As texts, because JSON has no infinity.
    texts = [{"kind": each.kind, "box": [f"{side}".replace("inf", "Infinity") for side in each.box]} for each in found]
    given = json.dumps({"boxes": texts, "width": width, "height": height})
    done = subprocess.run(
        [node, tmp_path / "run.mjs"], input=given, capture_output=True, text=True, check=True, timeout=60
    )
    wanted = [[colour_of(each), *corners(each, width - 1, height - 1)] for each in (*found, *mirrored)]
    assert json.loads(done.stdout) == wanted
