"""The images application: what is held out, what it says, that it learns, and the file for a user's own pictures."""

import io
import json
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.apps.images import photographs
from penstock.apps.images.app import LABELS, PHOTOGRAPHS, SIDE, app
from penstock.apps.images.model import network
from penstock.apps.images.photographs import TEST, TRAINING, VALIDATION
from penstock.apps.images.recipe import raw_pictures, recipe, top_accuracy
from penstock.apps.images.report import draw, report_of
from penstock.apps.images.template import NETWORKS, application_file
from penstock.core.errors import ApplicationError, BadExample, TrainError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.load import load
from penstock.train.data.camera_views import Views, plain_view
from penstock.train.data.picture_layouts import find_pictures, split_pictures
from penstock.train.recipe import Predictions
from penstock.train.run import train


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encoded(pixels: Any, kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, kind)
    return sink.getvalue()


def test_a_picture_of_any_size_becomes_what_the_network_sees() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=np.uint8)
    assert app.decode is not None
    raw = app.decode(encoded(pixels), "image/png")
    np.testing.assert_array_equal(raw[..., :3], pixels)
    assert raw.shape == (60, 100, 4)
    seen = find_application("images").prepare()(torch.tensor(raw))
    assert seen.shape == app.input.shape == (SIDE, SIDE, 3)
    # What is served is what was learned from, but for the rounding.
    assert np.abs(seen.numpy() - plain_view(Image.fromarray(pixels), SIDE)).max() <= 1


def test_it_says_the_class_and_the_kind_or_that_it_is_unsure() -> None:
    assert app.reply is not None
    assert app.output.labels is not None
    coins, coffee = app.output.labels.index("coins"), app.output.labels.index("coffee")
    chances = np.zeros(len(LABELS), np.float32)
    chances[coins] = 0.97
    assert {"label": "coins", "group": "table", "unsure": False}.items() <= app.reply(chances).items()
    chances[[coins, coffee]] = 0.1, 0.88
    assert {"label": "coffee", "group": "table", "unsure": False}.items() <= app.reply(chances).items()
    chances[[coins, coffee]] = 0.45, 0.46
    assert {"label": None, "group": "table", "unsure": False}.items() <= app.reply(chances).items()
    chances[[coins, coffee]] = 0.3, 0.4
    assert {"label": None, "group": None, "unsure": True}.items() <= app.reply(chances).items()


def test_each_photograph_is_there_and_of_one_label() -> None:
    files = [file for files in PHOTOGRAPHS.values() for file in files]
    assert len(set(files)) == len(files) == 18
    assert list(LABELS) == sorted(LABELS)
    pictures = [*photographs.pictures(0), *photographs.pictures(-1)]
    assert len({picture.read() for picture in pictures}) == 18
    shapes = {raw.shape for raw in photographs.raw_examples()}
    assert len(shapes) == len(LABELS)
    assert max(max(shape) for shape in shapes) <= 400


def test_what_is_held_out_has_places_and_distortions_of_its_own() -> None:
    assert set(TRAINING.cells) | set(VALIDATION.cells) | set(TEST.cells) == {0, 1, 2, 3, 4}
    assert len(TRAINING.cells) + len(VALIDATION.cells) + len(TEST.cells) == 5
    assert TEST.shake
    assert TEST.jpeg
    assert not TRAINING.shake
    assert not TRAINING.jpeg


def test_held_out_views_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "TEST_VIEWS", 2)
    one, other = photographs.test_views(), photographs.test_views()
    np.testing.assert_array_equal(one.inputs, other.inputs)
    assert np.bincount(one.targets).tolist() == [2] * len(LABELS)
    assert one.inputs.dtype == np.uint8


def test_the_network_is_as_small_as_it_says() -> None:
    made = network()
    assert 0.3e6 < sum(parameter.numel() for parameter in made.parameters()) < 0.6e6
    assert made.embed(torch.zeros(1, SIDE, SIDE, 3)).shape == (1, 256)


def test_the_recipe_learns_from_the_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "TEST_VIEWS", 1)
    monkeypatch.setattr(photographs, "VALIDATION_VIEWS", 1)
    data = recipe().data()
    assert isinstance(data.train, Views)
    assert data.train.varies
    assert len(data.train) == photographs.VIEWS * len(LABELS)
    assert (len(data.validation), data.test is not None) == (len(LABELS), True)


def test_the_report_counts_what_is_known() -> None:
    labels = ("cat", "dog/pug", "dog/terrier")
    logits = torch.tensor([[4.0, 0, 0], [4, 0, 0], [0, 4, 0], [0, 3, 4], [0, 4, 3.9]])
    report, confusion, bins = report_of(Predictions(logits, torch.tensor([0, 0, 1, 1, 2])), 2.0, labels)
    assert confusion.tolist() == [[2, 0, 0], [0, 1, 1], [0, 1, 0]]
    assert (report["top1"], report["group_top1"], report["top5"]) == (0.6, 1.0, 1.0)
    pug = next(line for line in report["classes"] if line["label"] == "dog/pug")
    assert (pug["examples"], pug["recall"], pug["precision"]) == (2, 0.5, 0.5)
    assert report["most_confused"][0] == {"is": "pug", "taken_for": "terrier", "times": 1}
    assert sum(count for count, _, _ in bins) == 5
    named = {line["unsure_below"]: (line["named"], line["right"]) for line in report["unsure_below"]}
    # exp(2) / (exp(2) + 2) is 0.79, and of 4 and 3 it is 0.59 against 0.36.
    assert named[0.5] == (0.8, 0.75)
    assert named[0.7] == (0.6, 1.0)
    assert named[0.8] == (0.0, None)
    assert top_accuracy(logits, torch.tensor([0, 0, 1, 1, 2]), 2) == 1.0
    assert report["calibration_error_without_temperature"] != report["calibration_error"]


@pytest.mark.thorough
def test_the_picture_of_many_classes_is_drawn(tmp_path: Path) -> None:
    for count in (2, 40, 200):
        kinds = tuple(f"kind {number}" for number in range(count))
        draw(tmp_path / f"{count}.png", np.eye(count, dtype=np.int64) * 3, [(count, 0.9, 1.0)], kinds)
        with Image.open(tmp_path / f"{count}.png") as image:
            assert image.width < 2500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pets")
    rng = np.random.default_rng(0)
    for label, colour in (("cat", 40), ("dog/pug", 120), ("dog/terrier", 200)):
        (root / label).mkdir(parents=True)
        for number in range(4):
            pixels = np.clip(rng.normal(colour, 20, (50 + number, 70, 3)), 0, 255).astype(np.uint8)
            (root / label / f"{number}.png").write_bytes(encoded(pixels))
    return root


@pytest.mark.parametrize("kind", sorted(NETWORKS))
def test_the_file_for_a_folder_declares_its_labels(folder: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "pets.py"
    file.write_text(application_file(folder, "pets", file="pets.py", side=32, network=kind))
    found = find_application(str(file))
    assert found.application.output.labels == ("cat", "pug", "terrier")
    recognition = found.application.recognition
    assert recognition is not None
    assert recognition.groups == ("cat", "dog", "dog")
    assert found.application.input.shape == (32, 32, 3)
    made = found.model().eval()
    assert made.predict(torch.zeros(1, 32, 32, 3)).shape == (1, 3)
    if kind == "mobile":
        assert 4 * sum(parameter.numel() for parameter in made.parameters()) < 5e6
    assert found.recipe().epochs > 1000
    assert found.recipe().selection.every_epochs > 20


def test_a_broken_picture_is_named_and_may_be_passed_over(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pets")
    held_out = split_pictures(find_pictures(tmp_path / "pets"))["validation"]
    held_out[0].file.write_bytes(b"no picture")
    views = Views(held_out, ("cat", "dog/pug", "dog/terrier"), 32)
    with pytest.raises(BadExample) as bad:
        views.read(np.arange(1), np.zeros(1, np.uint64), np.zeros((1, 32, 32, 3), np.uint8))
    assert str(bad.value) == (
        f"{held_out[0].file} cannot be read (it is no picture); replace or remove it, or give the recipe "
        f"loading=Loading(bad_examples='skip')."
    )
    # Of a training that passes over such, the golden examples are made of the others.
    assert len(raw_pictures(tmp_path / "pets")) == len(held_out) - 1
    for picture in held_out:
        picture.file.write_bytes(b"no picture")
    with pytest.raises(BadExample, match="it is no picture"):
        raw_pictures(tmp_path / "pets")


@pytest.mark.thorough
def test_a_folder_becomes_a_calibrated_bundle_and_a_report(folder: Path, tmp_path: Path) -> None:
    text = application_file(folder, "pets", file="pets.py", side=32).replace("width=0.75", "width=0.25")
    (tmp_path / "pets.py").write_text(text)
    found = find_application(str(tmp_path / "pets.py"))
    short = replace(found.recipe(), epochs=None, steps=2, batch_size=2)
    train(found, tmp_path / "run", short, overrides={}, quiet=True)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["examples"] == 3
    assert (tmp_path / "run" / "confusion.png").stat().st_size > 10_000
    predictor = load(tmp_path / "run" / "bundle")
    assert predictor.module.state_dict()["temperature"].item() == pytest.approx(report["temperature"])
    answer = predictor.answer((folder / "cat" / "1.png").read_bytes(), "image/png")
    assert {label for label, _ in answer["top"]} == {"cat", "pug", "terrier"}
    assert sum(probability for _, probability in answer["top"]) == pytest.approx(1, abs=1e-5)


def test_a_class_that_came_later_is_said(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pets.py"
    file.write_text(application_file(folder, "pets", file="pets.py", side=32).replace('    "dog/terrier",\n', ""))
    with pytest.raises(TrainError, match="'dog/terrier', which is not one of the application's 2; declare"):
        find_application(str(file)).recipe().data()


def test_folders_that_teach_nothing_are_said(folder: Path) -> None:
    one = folder.parent / "one"
    (one / "terrier").mkdir(parents=True)
    (one / "terrier" / "1.png").write_bytes((folder / "cat" / "1.png").read_bytes())
    with pytest.raises(ApplicationError, match="the one class 'terrier'"):
        application_file(one, "one", file="one.py")
    with pytest.raises(ApplicationError, match="no network 'vgg'; choose mobile or resnet50"):
        application_file(folder, "pets", file="pets.py", network="vgg")
    with pytest.raises(ApplicationError, match="32 at least"):
        application_file(folder, "pets", file="pets.py", side=16)
