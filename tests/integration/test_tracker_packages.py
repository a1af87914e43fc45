"""Loggers with their real packages, offline, where these are installed; tests/unit/test_callbacks.py has stand-ins."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# The packages take seconds to import.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

# One training that is logged, and what the package has of it afterwards.
LOGGED = """
import json, sys
from pathlib import Path
import numpy as np
from torch import nn
import penstock
from penstock.train.callbacks.trackers import MLflow, Trackio, WandB

make = {
    "wandb": lambda: WandB("flowers", mode="offline", every_steps=5),
    "mlflow": lambda: MLflow("flowers", tracking_uri="sqlite:///mlflow.db", every_steps=5),
    "trackio": lambda: Trackio("flowers", every_steps=5),
}
X, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
fitted = penstock.fit(
    nn.Linear(3, 2), (X, y), validation=(X, y), epochs=4, batch_size=10, device="cpu", out="run",
    callbacks=[make[sys.argv[1]]()],
)

def of_wandb():
    return {"files": sum(file.stat().st_size > 0 for file in Path("run/wandb").glob("offline-run-*/*.wandb"))}

def of_mlflow():
    import mlflow

    [run] = mlflow.search_runs(experiment_names=["flowers"], output_format="list")
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step_loss")
    return {"id": run.info.run_id, "status": run.info.status, "batch_size": run.data.params["batch_size"],
            "steps": [loss.step for loss in losses], "best_loss": run.data.metrics["best_loss"]}

def of_trackio():
    import sqlite3

    rows = sqlite3.connect("trackio/flowers.db").execute("select step, metrics from metrics").fetchall()
    return {"steps": sorted(step for step, metrics in rows if "step_loss" in json.loads(metrics))}

there = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}[sys.argv[1]]()
Path("there.json").write_text(json.dumps(there | {"loss": fitted.metrics["loss"]}))
"""


def logged(package: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What a package has of a training without a network, and what the training said."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    home = {"HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, package],
        cwd=folder,
        env=os.environ | home,
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert done.returncode == 0, done.stderr
    assert "failed at step" not in done.stdout
    return json.loads((folder / "there.json").read_text()), (folder / "run" / f"{package}-id.txt").read_text().strip()


def test_wandb_writes_files_to_sync(tmp_path: Path) -> None:
    there, known = logged("wandb", tmp_path)
    assert there["files"] == 1
    assert [run.name.rpartition("-")[2] for run in (tmp_path / "run" / "wandb").glob("offline-run-*")] == [known]


def test_mlflow_has_parameters_losses_and_the_best_metrics(tmp_path: Path) -> None:
    there, known = logged("mlflow", tmp_path)
    assert there["best_loss"] == pytest.approx(there["loss"])
    assert (there["id"], there["status"], there["batch_size"], there["steps"]) == (known, "FINISHED", "10", [5, 10, 15])


def test_trackio_has_losses_in_its_local_database(tmp_path: Path) -> None:
    there, known = logged("trackio", tmp_path)
    assert (there["steps"], known) == ([5, 10, 15], "run")
