"""`penstock new`, as it is typed."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from penstock.cli import build, main
from penstock.core.errors import ApplicationError
from penstock.core.source_files.find_application import find_application
from tests.support.pictures import picture_folder


def test_a_folder_becomes_an_application(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos")
    file = tmp_path / "apps" / "shapes.py"
    words = ["new", "images", str(file), "--data", str(root), "--side", "64"]
    result = CliRunner().invoke(build(), words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "penstock train" in result.output
    assert "cannot be read" not in result.output
    found = find_application(str(file)).application
    assert (found.name, found.output.labels, found.input.shape) == ("shapes", ("cats", "dogs", "eels"), (64, 64, 3))


def test_pictures_that_are_none_are_named(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos")
    (root / "cats" / "page.jpg").write_bytes(b"<html>not found</html>")
    words = ["new", "images", str(tmp_path / "shapes.py"), "--data", str(root)]
    said = CliRunner().invoke(build(), words, catch_exceptions=False).output
    assert "1 of them cannot be read: cats/page.jpg. Mend or remove them" in said


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("there.py", "there.py exists; choose another name"),
        ("pets.txt", "is not a Python file"),
        ("my pets.py", "would name the application 'my pets'"),
    ],
)
def test_files_that_cannot_be_written_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, sentence: str
) -> None:
    (tmp_path / "there.py").write_text("")
    words = ["penstock", "new", "images", str(tmp_path / file), "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(ApplicationError, match=r"pets\.py cannot be written \(File exists\); choose another folder"):
        CliRunner().invoke(build(), ["new", "text", str(tmp_path / "there/pets.py")], catch_exceptions=False)


TEXTS = "spam\tbuy it now\nham\tsee you at noon\nspam\tfree money\n"


@pytest.mark.parametrize("data", [None, TEXTS])
def test_texts_become_an_application(tmp_path: Path, data: str | None) -> None:
    file = tmp_path / "mail.py"
    words = ["new", "text", str(file)]
    if data is not None:
        (tmp_path / "texts.tsv").write_text(data)
        words += ["--data", str(tmp_path / "texts.tsv")]
    result = CliRunner().invoke(build(), words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "penstock train" in result.output
    found = find_application(str(file))
    assert found.application.name == "mail"
    assert found.application.output.labels == (("order", "question", "thanks") if data is None else ("ham", "spam"))
    pairs = found.module.texts()
    assert {label for _, label in pairs} == set(found.application.output.labels)
    if data is not None:
        assert pairs[0] == ("buy it now", "spam")
    # What it makes is trained as it is.
    recipe = found.recipe()
    learned = recipe.data()
    assert len(learned.train) + len(learned.validation) == len(pairs)
    assert recipe.total_steps(len(learned.train)) > 0
    assert sum(weight.numel() for weight in found.model().parameters()) > 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("spam\tbuy\nno tab\n", "has 'no tab' as text 2; write a label, a tab, and a text"),
        ("spam\tbuy\nspam\t\n", "as text 2; write a label, a tab, and a text"),
        ("spam\tbuy\n", "has 1 label in 1 texts; there must be two"),
        (None, "is no text that can be read"),
    ],
)
def test_texts_that_are_none_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: str | None, sentence: str
) -> None:
    if data is not None:
        (tmp_path / "texts.tsv").write_text(data)
    monkeypatch.setattr(
        sys, "argv", ["penstock", "new", "text", str(tmp_path / "a.py"), "--data", str(tmp_path / "texts.tsv")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a.py").exists()


COCO = {
    "images": [{"id": at, "file_name": f"{at}.png"} for at in range(3)],
    "categories": [{"id": 4, "name": "cat"}, {"id": 9, "name": "ox"}, {"id": 2, "name": "never seen"}],
    "annotations": [
        {"image_id": 0, "category_id": 9, "bbox": [10, 20, 30, 40]},
        {"image_id": 2, "category_id": 4, "bbox": [0, 0, 50, 20]},
    ],
}


def coco_folder(folder: Path, pictures: int = 3) -> Path:
    folder.mkdir()
    for at in range(pictures):
        Image.new("RGB", (100, 80), (at, 0, 0)).save(folder / f"{at}.png")
    (folder / "instances.json").write_text(json.dumps(COCO))
    return folder / "instances.json"


def test_boxes_of_coco_become_a_detector(tmp_path: Path) -> None:
    file, data = tmp_path / "farm.py", coco_folder(tmp_path / "coco", pictures=2)
    said = CliRunner().invoke(build(), ["new", "detector", str(file), "--data", str(data)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    assert "has 2 boxes in 3 pictures." in said.output
    assert "1 of them are not there: " in said.output
    Image.new("RGB", (100, 80)).save(tmp_path / "coco" / "2.png")
    found = find_application(str(file))
    assert found.application.shows is not None
    assert found.application.shows.labels == ("cat", "ox")
    assert found.application.input.shape == (3, 320, 320)
    learned = found.recipe().data()
    assert (len(learned.train), len(learned.validation)) == (2, 1)
    assert [raw.shape for raw in found.recipe().raw_examples()] == [(80, 100, 4)]
    # Every object of the three pictures, in the pixels of the frame.
    pictures, rows = np.zeros((2, 3, 320, 320), np.uint8), list[list[float]]()
    for part in (learned.train, learned.validation):
        count = len(part)
        tree: Any = part.read(np.arange(count), np.zeros(count, np.uint64), pictures[:count])
        rows += tree["boxes"][tree["classes"] >= 0].tolist()
    assert sorted(rows) == [[0, 0, 160, 64], [32, 64, 128, 192]]


def test_a_detector_without_data_draws_its_own(tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    said = CliRunner().invoke(build(), ["new", "detector", str(file)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    found = find_application(str(file))
    pixels, boxes, classes = next(each for each in map(found.module.drawn, range(9)) if len(each[1]))
    assert pixels.shape == (128, 192, 3)
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert set(classes) <= {0, 1}
    assert found.recipe().steps == 400


def test_what_is_no_data_for_a_detector_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.json").write_text("{}")
    for words, sentence in (
        (["--data", str(tmp_path / "other.json")], "is not a COCO file of instances (KeyError: 'annotations')"),
        (["--pictures", str(tmp_path)], "without boxes; give them with --data"),
    ):
        monkeypatch.setattr(sys, "argv", ["penstock", "new", "detector", str(tmp_path / "a.py"), *words])
        with pytest.raises(SystemExit):
            main()
        assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a.py").exists()
