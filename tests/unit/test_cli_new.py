"""`penstock new images`, as it is typed."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import build, main
from penstock.core.find_application import find_application
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
