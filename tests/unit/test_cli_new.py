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
