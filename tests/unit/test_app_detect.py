"""The detector: drawn scenes, layouts of COCO and KITTI, the frame, the boxes at peaks, the loss and its precision."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from penstock.apps.detect.app import HEIGHT, LABELS, STRIDE, WIDTH, app
from penstock.apps.detect.drawn import MAX_OBJECTS, draw_scenes
from penstock.apps.detect.layouts import BoxedPictures, coco_pictures, kitti_pictures
from penstock.apps.detect.loss import augment, detection_loss
from penstock.apps.detect.precision import mean_average_precision
from penstock.core.errors import ApplicationError, BadExample, TrainError
from penstock.models.detector import CentreDetector
from penstock.nn.letterbox import Letterbox
from penstock.nn.peak_boxes import PeakBoxes

ROWS, COLUMNS = HEIGHT // STRIDE, WIDTH // STRIDE


@pytest.mark.parametrize("world", ["default", "other"])
def test_a_drawn_scene_is_a_function_of_its_seed(world: str) -> None:
    one, again = draw_scenes(world, 7, 2), draw_scenes(world, 8, 1)
    assert one.pixels.shape == (2, 3, HEIGHT, WIDTH)
    assert np.array_equal(one.pixels[1], again.pixels[0])
    assert not np.array_equal(one.pixels[0], one.pixels[1])
    assert one.boxes.shape == (2, MAX_OBJECTS, 4)
    boxes = one.boxes[one.classes >= 0]
    assert len(boxes) > 0
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (boxes >= 0).all()
    assert (boxes <= [WIDTH, HEIGHT, WIDTH, HEIGHT]).all()


@pytest.mark.parametrize("size", [(256, 448), (512, 896), (640, 1120), (128, 224), (100, 50), (37, 300), (1, 1)])
def test_a_picture_fits_the_frame(size: tuple[int, int]) -> None:
    raw = torch.randint(0, 256, (*size, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made, share = Letterbox(HEIGHT, WIDTH)(raw), max(size[0] / HEIGHT, size[1] / WIDTH)
    high, wide = size[0] / share, size[1] / share
    assert made.shape == (3, HEIGHT, WIDTH)
    assert not made[:, round(high) + 1 :].any()
    assert not made[:, :, round(wide) + 1 :].any()
    if high == round(high) and wide == round(wide):
        pixels = raw[..., :3].permute(2, 0, 1)[None].float()
        expected = F.interpolate(pixels, (round(high), round(wide)), mode="bilinear", antialias=True)[0]
        assert (made[:, : round(high), : round(wide)] - expected).abs().max() < 0.01


def test_a_frame_has_a_size() -> None:
    with pytest.raises(ApplicationError, match="height 0 and width 4; they must be whole numbers"):
        Letterbox(0, 4)


def heat_and_sides() -> tuple[torch.Tensor, torch.Tensor]:
    heat, sides = torch.full((2, 4, ROWS, COLUMNS), -9.0), torch.zeros(2, 4, ROWS, COLUMNS)
    # A car with a weaker cell beside its middle, a light at the corner, something below the threshold.
    heat[0, 0, 10, 20], heat[0, 0, 10, 21], heat[0, 3, 0, 0], heat[0, 1, 30, 30] = 2.0, 1.5, 1.0, -4.0
    sides[0, :, 10, 20] = torch.tensor([3.0, 2.0, 5.0, 4.0]).log()
    return heat, sides


def test_boxes_are_at_the_peaks() -> None:
    made = PeakBoxes(stride=STRIDE, most=5, threshold=0.05)(*heat_and_sides())
    assert made["objects"].tolist() == [2, 0]
    assert made["classes"][0, :2].tolist() == [0, 3]
    assert made["scores"][0, :2].tolist() == pytest.approx([torch.tensor(each).sigmoid().item() for each in (2.0, 1.0)])
    x, y = 20.5 * STRIDE, 10.5 * STRIDE
    assert made["boxes"][0, 0].tolist() == pytest.approx([x - 12, y - 8, x + 20, y + 16])
    assert made["boxes"][0, 1].tolist() == pytest.approx([0, 0, 6, 6])


def test_a_plain_region_has_the_same_peak_however_it_is_rounded() -> None:
    heat, sides = torch.full((8, 4, ROWS, COLUMNS), 1.0), torch.zeros(8, 4, ROWS, COLUMNS)
    heat += 1e-5 * torch.rand(heat.shape, generator=torch.Generator().manual_seed(0))
    made = PeakBoxes(stride=STRIDE, most=5, threshold=0.05)(heat, sides)
    assert made["objects"].tolist() == [4] * 8
    assert (made["boxes"][:, :4] == made["boxes"][0, 0]).all()


def test_half_precision_has_the_same_boxes() -> None:
    heat, sides = heat_and_sides()
    finish = PeakBoxes(stride=STRIDE, most=5, threshold=0.05)
    one, other = finish(heat, sides), finish(heat.bfloat16(), sides.bfloat16())
    assert torch.equal(one["objects"], other["objects"])
    assert other["boxes"].dtype == torch.float32
    assert (one["boxes"][0, :2] - other["boxes"][0, :2]).abs().max() < 0.2


def test_the_loss_is_least_where_the_boxes_are_right() -> None:
    boxes, classes = torch.zeros(1, 3, 4), torch.tensor([[2, -1, -1]])
    boxes[0, 0] = torch.tensor([80.0, 40.0, 96.0, 60.0])
    wanted = {"boxes": boxes, "classes": classes}
    heat, sides = torch.full((1, 4, ROWS, COLUMNS), -7.0), torch.zeros(1, 4, ROWS, COLUMNS)
    heat[0, 2, 12, 22] = 7.0
    away = torch.stack([torch.arange(COLUMNS) + 0.5 - 20, 24.0 - torch.arange(COLUMNS) - 0.5]).clamp(min=0.01)
    down = torch.stack([torch.arange(ROWS) + 0.5 - 10, 15.0 - torch.arange(ROWS) - 0.5]).clamp(min=0.01)
    sides[0, 0::2], sides[0, 1::2] = away[:, None].log(), down[:, :, None].log()
    right = detection_loss({"heat": heat, "sides": sides}, wanted, stride=STRIDE)
    elsewhere = detection_loss({"heat": heat.roll(9, 3), "sides": sides}, wanted, stride=STRIDE)
    larger = detection_loss({"heat": heat, "sides": sides + 1}, wanted, stride=STRIDE)
    nothing = detection_loss({"heat": heat, "sides": sides}, {**wanted, "classes": classes * 0 - 1}, stride=STRIDE)
    assert right < 0.2
    assert right + 0.1 < larger < elsewhere
    assert torch.isfinite(nothing)


def test_a_mirrored_picture_has_mirrored_boxes() -> None:
    pixels, boxes = torch.zeros(64, 3, 8, 16), torch.zeros(64, 1, 4)
    pixels[:, :, 2:4, 1:5] = 200
    boxes[:] = torch.tensor([1.0, 2.0, 5.0, 4.0])
    wanted = {"boxes": boxes, "classes": torch.zeros(64, 1, dtype=torch.int64)}
    made, targets = augment(pixels, wanted, torch.Generator().manual_seed(0))
    found = targets["boxes"][:, 0].int().tolist()
    assert {tuple(box) for box in found} == {(1, 2, 5, 4), (11, 2, 15, 4)}
    for picture, (left, top, right, bottom) in zip(made, found, strict=True):
        inside = picture[:, top:bottom, left:right]
        assert inside.mean() > picture.mean() + 50


def test_precision_counts_each_true_box_once() -> None:
    box = np.array([[0.0, 0.0, 10.0, 10.0]])
    true = [(np.concatenate([box, box + 50]), np.array([0, 0])), (box, np.array([1]))]
    twice = (np.concatenate([box, box, box + 50]), np.array([0, 0, 0]), np.array([0.9, 0.8, 0.7]))
    missed = (np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0))
    # Of class 0 the second of three is wrong: precision 1 up to a recall of a half, then 2/3. Class 1 is not found.
    expected = (51 * 1 + 50 * 2 / 3) / 101 / 2
    assert mean_average_precision([twice, missed], true, 4, 0.5) == pytest.approx(expected)


def picture(file: Path, width: int, height: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (255, 0, 0)).save(file)


def test_coco_is_read_and_scaled_into_the_frame(tmp_path: Path) -> None:
    picture(tmp_path / "val/1.png", WIDTH * 2, HEIGHT)
    picture(tmp_path / "val/2.png", 60, 40)
    given: dict[str, Any] = {
        "images": [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "2.png"}],
        "categories": [{"id": 3, "name": "bus"}, {"id": 10, "name": "traffic light"}, {"id": 11, "name": "cat"}],
        "annotations": [
            {"image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 40], "iscrowd": 0},
            {"image_id": 1, "category_id": 10, "bbox": [1, 2, 3, 4]},
            {"image_id": 1, "category_id": 11, "bbox": [1, 2, 3, 4]},
            {"image_id": 1, "category_id": 3, "bbox": [0, 0, 99, 99], "iscrowd": 1},
        ],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(given))
    found = coco_pictures(file, tmp_path / "val")
    assert [LABELS[kind] for kind in found[0].classes] == ["car", "light"]
    assert found[0].boxes.tolist() == [[10, 20, 40, 60], [1, 2, 4, 6]]
    assert found[1].boxes.shape == (0, 4)
    examples = BoxedPictures(found)
    inputs = examples.empty(2)
    targets = examples.read(np.arange(2), np.zeros(2, np.uint64), inputs)
    assert targets["boxes"][0, 0].tolist() == [5, 10, 20, 30]
    assert targets["classes"].tolist() == [[0, 3], [-1, -1]]
    assert inputs[0, :, : HEIGHT // 2 - 1].reshape(3, -1).min(1).tolist() == [255, 0, 0]
    assert not inputs[0, :, HEIGHT // 2 + 1 :].any()
    given["annotations"][0]["bbox"] = [1, 2, 3]
    file.write_text(json.dumps(given))
    with pytest.raises(TrainError, match="is not a COCO file of instances"):
        coco_pictures(file, tmp_path / "val")


def test_kitti_is_read(tmp_path: Path) -> None:
    picture(tmp_path / "image_2/000001.png", WIDTH, HEIGHT)
    label = tmp_path / "label_2/000001.txt"
    with pytest.raises(TrainError, match=r"has no label_2/\*\.txt"):
        kitti_pictures(tmp_path)
    label.parent.mkdir()
    label.write_text(
        "Van 0.00 0 -1.57 100.5 50 200 90.25 1.6 1.6 3.4 -1.0 1.7 10 -1.5\n"
        "DontCare -1 -1 -10 1 2 3 4 -1 -1 -1 -1000 -1000 -1000 -10\n"
        "Pedestrian 0.00 0 0.2 10 20 30 80 1.8 0.5 1.0 2 1.5 8 0.0\n"
    )
    one = kitti_pictures(tmp_path)[0]
    assert one.boxes.tolist() == [[100.5, 50, 200, 90.25], [10, 20, 30, 80]]
    assert [LABELS[kind] for kind in one.classes] == ["car", "person"]
    label.write_text("Car 0 0 0 1 2\n")
    with pytest.raises(TrainError, match=r"line 1 of .* must be a type and at least seven numbers"):
        kitti_pictures(tmp_path)
    (tmp_path / "label_2/000002.txt").write_text("")
    label.write_text("")
    with pytest.raises(TrainError, match=r"000002\.txt has no picture"):
        kitti_pictures(tmp_path)


def test_kitti_takes_any_labels(tmp_path: Path) -> None:
    picture(tmp_path / "image_2/000001.png", WIDTH, HEIGHT)
    label = tmp_path / "label_2/000001.txt"
    label.parent.mkdir()
    label.write_text("Cyclist 0.00 0 -1.57 100.5 50 200 90.25 1.6 1.6 3.4 -1.0 1.7 10 -1.5\n")
    names = {"Cyclist": "cyclist"}
    assert kitti_pictures(tmp_path, names=names, labels=("tram", "cyclist"))[0].classes.tolist() == [1]
    with pytest.raises(TrainError, match="gives 'Cyclist' the label 'cyclist', which is none of the labels car, "):
        kitti_pictures(tmp_path, names=names)


@pytest.mark.parametrize("box", ["200 50 100 90", "100 90 200 50", "nan 50 200 90", "100 50 inf 90"])
def test_a_box_of_kitti_without_a_size_is_named(tmp_path: Path, box: str) -> None:
    (tmp_path / "label_2").mkdir()
    (tmp_path / "label_2/7.txt").write_text(f"Car 0 0 0 1 2 3 4\nCar 0 0 0 {box}\n")
    with pytest.raises(TrainError, match=rf"line 2 of .*7\.txt has the box {box}; it must be"):
        kitti_pictures(tmp_path)


def test_a_category_of_coco_without_a_label_is_named(tmp_path: Path) -> None:
    file = tmp_path / "instances.json"
    categories = [{"id": 3, "name": "bicycle"}, {"id": 4, "name": "cat"}]
    file.write_text(json.dumps({"images": [], "categories": categories, "annotations": []}))
    with pytest.raises(TrainError, match="gives 'bicycle' the label 'bike', which is none of the labels car, "):
        coco_pictures(file, tmp_path, names={"bicycle": "bike"})
    assert coco_pictures(file, tmp_path, names={"bicycle": "bike"}, labels=("bike",)) == []


@pytest.mark.parametrize("bbox", [[1, 2, -3, 4], [1, 2, 3, -4], [1, 2, float("nan"), 4], [1, 2, 3, float("inf")]])
def test_a_box_of_coco_without_a_size_is_named(tmp_path: Path, bbox: list[float]) -> None:
    file = tmp_path / "instances.json"
    given = {
        "images": [{"id": 1, "file_name": "1.png"}],
        "categories": [{"id": 3, "name": "bus"}],
        "annotations": [
            {"id": 8, "image_id": 1, "category_id": 3, "bbox": [1, 2, 0, 4]},
            {"id": 9, "image_id": 1, "category_id": 3, "bbox": bbox},
        ],
    }
    file.write_text(json.dumps(given))
    with pytest.raises(TrainError, match=r"annotation 9 of .*instances\.json has the bbox \[1"):
        coco_pictures(file, tmp_path)


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "label_2").mkdir()
    (tmp_path / "label_2/1.txt").write_text("")
    (tmp_path / "image_2").mkdir()
    (tmp_path / "image_2/1.png").write_bytes(b"no picture")
    examples = BoxedPictures(kitti_pictures(tmp_path))
    with pytest.raises(BadExample, match=r"1\.png cannot be read"):
        examples.read(np.arange(1), np.zeros(1, np.uint64), examples.empty(1))
    with pytest.raises(TrainError, match="no pictures"):
        BoxedPictures([])


def test_the_network_gives_what_its_finish_takes() -> None:
    assert app.finish is not None
    made = CentreDetector(len(LABELS)).eval()(torch.zeros(1, 3, HEIGHT, WIDTH))
    assert {name: (*tensor.shape[1:],) for name, tensor in made.items()} == {
        spec.name: spec.shape for spec in app.finish.tensors
    }
