"""What a training says: its progress, the errors of a user's functions, and the comparison of runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import TrainError
from penstock.train.named_values import noted
from penstock.train.report.progress import Progress
from penstock.train.report.run_comparison import Run, read_run


def test_the_form_of_several_tensors_is_named() -> None:
    with pytest.raises(ValueError, match="no") as raised, noted("The loss", {"a": torch.zeros(2, 3)}, (np.ones(2), 1)):
        raise ValueError("no")
    assert raised.value.__notes__ == [
        "The loss was given outputs {'a': float32[2, 3]} and targets (float64[2], a int)."
    ]
    with pytest.raises(TrainError) as refused, noted("The loss", 1, 2):
        raise TrainError("a sentence of its own")
    assert not hasattr(refused.value, "__notes__")


def recorded(folder: Path, lines: list[dict[str, float]], **recipe: str) -> Run:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"state": "finished", "recipe": recipe}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_run(folder)


def test_runs_are_compared_by_the_metrics_of_their_best_weights(tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "seconds": step,
            "validation_loss": loss,
            "validation_loss.box": box,
            "validation_recall": recall,
        }
        for step, loss, box, recall in ((1, 0.9, 0.3, 0.95), (2, 0.4, 0.2, 0.7), (3, 0.5, 0.1, 0.8))
    ]
    names = ("validation_loss", "validation_loss.box", "validation_recall")
    by_loss = recorded(tmp_path / "loss", lines, **{"selection.metric": "loss", "selection.mode": "min"})
    assert [by_loss.best(name) for name in names] == [0.4, 0.2, 0.7]
    by_recall = recorded(tmp_path / "recall", lines, **{"selection.metric": "recall", "selection.mode": "max"})
    assert [by_recall.best(name) for name in names] == [0.9, 0.3, 0.95]
    # A part of a loss falls to a value too.
    assert by_loss.seconds_to("validation_loss.box", 0.25) == 2
    # A record of a run that does not say how it selects.
    unknown = recorded(tmp_path / "unknown", lines)
    assert [unknown.best(name) for name in (*names, "validation_f1")] == [0.4, 0.1, 0.95, None]


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    recorded(tmp_path / "run", [{"step": 1, "seconds": 1, "train_loss": 1.0, "validation_loss": 0.9}])
    words = ["runs", str(tmp_path), "--picture", str(tmp_path / "none" / "runs.png")]
    with pytest.raises(TrainError, match=r"runs.png cannot be written \(No such file .*; name another file with --pic"):
        CliRunner().invoke(build(), words, catch_exceptions=False, standalone_mode=False)


def test_a_run_that_takes_no_step_shows_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("x", 8, 8):
        pass
    assert capsys.readouterr().out == "Training x: step 8/8  0 s left\n"
