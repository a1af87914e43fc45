"""The mitosis application: generated slides, training tiles, layouts of the challenges, and F1."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.apps.mitosis.app import CELLS, DENSE, MARGIN, STRIDE, TILE, app, reply
from penstock.apps.mitosis.evaluate import Matches, match
from penstock.apps.mitosis.layouts import midog_slides, slide_data, tupac_slides
from penstock.apps.mitosis.model import MitosisNet
from penstock.apps.mitosis.recipe import best_f1, calibrate, focal_loss
from penstock.apps.mitosis.style import FIRST, SECOND
from penstock.apps.mitosis.tiles import AnnotatedSlide, SlideTiles, target_map
from penstock.apps.mitosis.tissue import APART, EDGE, make_slide
from penstock.core.errors import BadExample, TrainError
from penstock.core.pictures.dense import Find
from penstock.core.spec import Array
from penstock.device.slides import ArraySlide
from penstock.train.recipe import Predictions


@pytest.mark.parametrize("style", [FIRST, SECOND])
def test_a_generated_slide_is_a_function_of_its_seed(style: object) -> None:
    assert style in (FIRST, SECOND)
    made = [make_slide(seed, 200, 260, style, figures=150, look_alikes=150) for seed in (1, 1, 2)]  # pyright: ignore
    assert made[0].pixels.shape == (200, 260, 3)
    assert np.array_equal(made[0].pixels, made[1].pixels)
    assert np.array_equal(made[0].figures, made[1].figures)
    assert not np.array_equal(made[0].pixels, made[2].pixels)
    places = np.concatenate([made[0].figures, made[0].look_alikes])
    assert len(made[0].figures) >= 2
    assert (places >= EDGE).all()
    assert (places <= np.array([260, 200]) - EDGE).all()
    away = np.hypot(*(places[:, None] - places).transpose(2, 0, 1)) + 1e9 * np.eye(len(places))
    assert away.min() >= APART


def test_a_figure_is_darker_than_its_cell() -> None:
    darker = []
    made = make_slide(5, 600, 600, FIRST, figures=40, look_alikes=0)
    for x, y in made.figures.astype(int).tolist():
        red = made.pixels[y - 40 : y + 40, x - 40 : x + 40, 0].astype(int)
        darker.append(np.percentile(red[25:55, 25:55], 5) < np.percentile(red, 50) - 25)
    assert len(darker) >= 6
    assert all(darker)


def test_tiles_of_slides_are_examples() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (700, 600, 3)).astype(np.uint8)
    figures = np.array([[100.0, 90.0], [550.0, 650.0]], np.float32)
    one = AnnotatedSlide(slide=ArraySlide(pixels), figures=figures, look_alikes=np.empty((0, 2), np.float32))
    whole = SlideTiles([one])
    assert len(whole) == 4
    inputs = whole.empty(4)
    targets = whole.read(np.arange(4), np.zeros(4, np.uint64), inputs)
    assert np.array_equal(inputs[0, MARGIN:, MARGIN:], pixels[: TILE - MARGIN, : TILE - MARGIN])
    assert [np.argwhere(target == 1).tolist() for target in targets] == [[[11, 12]], [], [], [[17, 4]]]
    drawn = SlideTiles([one], 6, focus=1.0)
    assert drawn.varies
    inputs = drawn.empty(6)
    seeds = np.arange(6, dtype=np.uint64)
    targets = drawn.read(np.arange(6), seeds, inputs)
    assert (targets.max((1, 2)) == 1).all(), "every tile is near a figure"
    again = drawn.empty(6)
    assert np.array_equal(drawn.read(np.arange(6), seeds, again), targets)
    assert np.array_equal(again, inputs)
    with pytest.raises(TrainError, match="no slides"):
        SlideTiles([])


def test_the_target_is_one_in_the_cell_of_a_centre() -> None:
    target = target_map(np.array([[4 * STRIDE + 1.0, 2 * STRIDE + 7.0], [-500, 0]]), 0, 0)
    assert target.shape == (CELLS, CELLS)
    assert np.argwhere(target == 1).tolist() == [[2, 4]]
    assert 0.3 < target[2, 3] < 1
    assert target[40, 40] == 0


def test_the_loss_is_least_where_the_map_is_right() -> None:
    target = torch.from_numpy(target_map(np.array([[100.0, 100.0]]), 0, 0))[None]
    right = torch.where(target == 1, 6.0, -6.0)[..., None]
    wrong = -right
    assert focal_loss(right, target) < 0.1 < 10 < focal_loss(wrong, target)
    assert torch.isfinite(focal_loss(right.half(), torch.zeros_like(target)))


def test_the_best_threshold_becomes_one_half(tmp_path: Path) -> None:
    target = torch.zeros(2, CELLS, CELLS)
    target[0, 10, 10] = target[1, 50, 20] = 1
    logits = torch.full((2, CELLS, CELLS, 1), -9.0)
    # Two figures and something else, whose score is between 0.1 and 0.2.
    logits[0, 10, 10], logits[1, 50, 20], logits[0, 40, 40] = -1.0, -1.2, -2.0
    assert best_f1(logits, target) == 1
    made = calibrate(tmp_path, Predictions(logits, target), Predictions(logits, target))
    net = MitosisNet(channels=1, wide=1)
    net.load_state_dict(net.state_dict() | made)
    scores = (logits + net.shift).sigmoid()
    assert (scores > DENSE.threshold).sum() == 2
    assert json.loads((tmp_path / "report.json").read_text())["test_f1"] == 1


def finds(*places: tuple[float, float, float]) -> list[Find]:
    return [Find(label="mitosis", score=score, x=x, y=y) for score, x, y in places]


def test_finds_are_matched_one_to_one_within_the_distance() -> None:
    figures = np.array([[100.0, 100.0], [200.0, 100.0]])
    matched = match(finds((0.6, 101, 100), (0.9, 120, 100), (0.8, 200, 131), (0.7, 229, 100)), figures)
    assert matched.score.tolist() == [0.9, 0.8, 0.7, 0.6]
    assert matched.right.tolist() == [True, False, True, False]
    assert matched.f1() == pytest.approx(2 * 2 / (4 + 2))
    assert matched.f1(0.65) == pytest.approx(2 * 2 / (3 + 2))
    threshold, best = matched.best_threshold()
    assert 0.6 < threshold < 0.7
    assert best == pytest.approx(0.8)
    nothing = match([], np.empty((0, 2)))
    assert nothing.f1() == 1
    assert Matches.joined([matched, match([], figures)]).f1() == pytest.approx(2 * 2 / (4 + 4))


def test_the_reply_of_a_tile_has_its_finds_in_its_pixels() -> None:
    map_hwK = np.zeros(app.output.shape, np.float32)
    map_hwK[3, 5] = 0.75
    assert reply(map_hwK) == {
        "finds": [{"label": "mitosis", "score": 0.75, "x": MARGIN + 5.5 * STRIDE, "y": MARGIN + 3.5 * STRIDE}]
    }


def png(file: Path, pixels: Array) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


def midog(folder: Path) -> dict[str, object]:
    png(folder / "images" / "001.tiff", np.full((120, 150, 3), 7, np.uint8))
    png(folder / "002.tiff", np.full((60, 50, 3), 9, np.uint8))
    return {
        "images": [
            {"id": 1, "file_name": "001.tiff", "width": 150, "height": 120},
            {"id": 2, "file_name": "002.tiff", "width": 50, "height": 60},
            {"id": 3, "file_name": "003.tiff", "width": 50, "height": 60},
        ],
        "annotations": [
            {"image_id": 1, "category_id": 1, "bbox": [10, 20, 60, 70]},
            {"image_id": 1, "category_id": 2, "bbox": [80, 40, 130, 90]},
            {"image_id": 2, "category_id": 2, "bbox": [0, 0, 50, 50]},
        ],
    }


def test_the_layout_of_midog_is_read(tmp_path: Path) -> None:
    given = midog(tmp_path)
    (tmp_path / "MIDOG.json").write_text(json.dumps(given))
    first, second = midog_slides(tmp_path)
    assert first.figures.tolist() == [[35, 45]]
    assert first.look_alikes.tolist() == [[105, 65]]
    assert (first.slide.width, first.slide.height) == (150, 120)
    assert (first.slide.read(0, 0, 150, 120) == 7).all()
    assert (second.slide.read(10, 10, 5, 5) == 9).all()
    assert second.figures.shape == (0, 2)


def test_a_layout_that_is_not_midogs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="cannot be read"):
        midog_slides(tmp_path)
    given = midog(tmp_path)
    given["annotations"] = [{"image_id": 1, "category_id": 1, "bbox": [60, 20, 50, 50]}]
    (tmp_path / "MIDOG.json").write_text(json.dumps(given))
    with pytest.raises(TrainError, match=r"the box .* is not left, top, right, bottom"):
        midog_slides(tmp_path)
    given["annotations"] = [{"image_id": 3, "category_id": 1, "bbox": [0, 0, 50, 50]}]
    (tmp_path / "MIDOG.json").write_text(json.dumps(given))
    with pytest.raises(TrainError, match=r"003\.tiff is missing"):
        midog_slides(tmp_path)


def test_the_layout_of_tupac_is_read(tmp_path: Path) -> None:
    for case in range(1, 11):
        png(tmp_path / "images" / f"{case:02}" / "01.tif", np.full((64, 80, 3), case, np.uint8))
    truth = tmp_path / "truth" / "03" / "01.csv"
    truth.parent.mkdir(parents=True)
    truth.write_text("12,30\n50,7\n")
    slides = tupac_slides(tmp_path / "images", tmp_path / "truth")
    assert len(slides) == 10
    assert slides[2].figures.tolist() == [[30, 12], [7, 50]]
    assert slides[3].figures.shape == (0, 2)
    data = slide_data(slides, 3)
    assert (len(data.train), len(data.validation)) == (24, 1)
    with pytest.raises(TrainError, match="there are 9 slides"):
        slide_data(slides[:9])
    truth.write_text("12;30\n")
    with pytest.raises(TrainError, match="not a row and a column"):
        tupac_slides(tmp_path / "images", tmp_path / "truth")
    with pytest.raises(TrainError, match=r"no \.tif below it"):
        tupac_slides(tmp_path / "truth", tmp_path)
    # A mistyped folder, and one that is not that of the figures.
    for folder in ("nowhere", "images"):
        with pytest.raises(TrainError, match=rf"{folder} has no CASE/NAME\.csv below it"):
            tupac_slides(tmp_path / "images", tmp_path / folder)


def test_a_damaged_slide_is_a_bad_example(tmp_path: Path) -> None:
    png(tmp_path / "images" / "01" / "01.tif", np.zeros((64, 80, 3), np.uint8))
    (tmp_path / "images" / "01" / "01.csv").write_text("12,30\n")
    slides = tupac_slides(tmp_path / "images", tmp_path / "images")
    (tmp_path / "images" / "01" / "01.tif").write_bytes(b"II*\0")
    tiles = SlideTiles(slides)
    with pytest.raises(BadExample, match=r"01\.tif"):
        tiles.read(np.array([0]), np.zeros(1, np.uint64), tiles.empty(1))
