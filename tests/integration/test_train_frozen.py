"""Frozen layers of every placement in two processes: they keep their weights and have no optimizer state."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.lazy_tensors import read_tensors
from tests.support.training import APPLICATION, LIMIT_S, losses, penstock_run

pytestmark = pytest.mark.timeout(3 * LIMIT_S)

# layers.0 is fully sharded, layers.2 column-parallel, layers.4 row-parallel, layers.6 vocab-parallel.
FROZEN = '["layers.0.weight", "layers.2", "layers.4.weight"]'
TRAINED = {"layers.0.bias", "layers.4.bias", "layers.6.weight", "layers.6.bias"}


def trained(app: Path, name: str, steps: int, *options: object) -> Path:
    run = app.parent / name
    settings = ["--set", f"freeze={FROZEN}", "--set", "lr_scale.layers.6=2", "--set", "ema.decay=0.9"]
    done = penstock_run("train", app, "--out", run, *settings, "--steps", steps, *options)
    assert done.returncode == 0, done.stderr
    return run


# In one process: tests/unit/test_fine_tuning.py.
@pytest.mark.slow
def test_two_processes_train_frozen_layers_as_one_does(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APPLICATION)
    alone, together = trained(app, "alone", 40), trained(app, "together", 40, "--processes", 2)
    for one, two in zip(losses(alone), losses(together), strict=True):
        assert two == pytest.approx(one, rel=1e-3)
    # The first weights depend on the seed alone.
    first, last = (load_file(run / "bundle" / "weights.safetensors") for run in (trained(app, "short", 1), together))
    changed = {name for name in last if not first[name].equal(last[name])}
    assert changed == TRAINED
    checkpoint = newest_checkpoint(together / "checkpoints")
    assert checkpoint is not None
    state = checkpoint.state["optimizer"]
    assert len(state["state"]) == len(TRAINED)
    assert sum(len(group["params"]) for group in read_tensors(state["param_groups"])) == len(TRAINED)
    again = penstock_run("train", app, "--out", tmp_path / "wrong", "--set", 'freeze=["layer.0"]', "--processes", 2)
    assert again.returncode != 0
    assert "freeze has 'layer.0', which matches no parameter of the network; the nearest are layers." in again.stderr
