"""The textbook's script trains every activation with both losses and draws them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_activation_and_loss_is_trained_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    script = ROOT / "examples" / "textbook" / "curves.py"
    done = subprocess.run(
        [sys.executable, script, "--epochs", "6", "--out", tmp_path / "runs", "--picture", picture],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if "held-out accuracy" in line]
    accuracies = {(words[0], words[1]): float(words[4]) for words in lines}
    assert len(accuracies) == 8
    assert accuracies["cross_entropy", "relu"] > 0.85
    assert accuracies["cross_entropy", "maxout"] > 0.85
    assert accuracies["cross_entropy", "sigmoid"] < accuracies["cross_entropy", "tanh"]
    assert picture.stat().st_size > 10_000
    assert (tmp_path / "runs" / "mean_square-tanh" / "bundle" / "manifest.json").exists()
