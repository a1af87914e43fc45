"""`penstock runs` of a folder that cannot be written: the table is the answer, and the picture an extra."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import TrainError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"name": "iris", "state": "finished", "recipe": {}, "overrides": {}}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "seconds": 1.0, "train_loss": 0.5}) + "\n")
    return run.parent


def test_a_folder_that_cannot_be_written_costs_the_picture_alone(runs: Path) -> None:
    # Permissions do not stop a superuser, and a folder in the place of the file does.
    (runs / "runs.png").mkdir()
    done = CliRunner().invoke(build(), ["runs", str(runs)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "first" in done.stdout
    said = (
        f"Curves: none, because {runs}/runs.png cannot be written (Is a directory); name another file with --picture."
    )
    assert said in done.stdout


def test_a_picture_that_is_named_and_cannot_be_written_is_an_error(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "none" / "curves.png"
    with pytest.raises(TrainError, match=r"curves.png cannot be written \(No such file or directory\); name another"):
        CliRunner().invoke(build(), ["runs", str(runs), "--picture", str(file)], catch_exceptions=False)
