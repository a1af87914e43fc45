"""Networks of torchvision and timm take the path of every other: captured steps, several GPUs, their own names."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import penstock
from penstock.core.spec import Array
from penstock.train.recipe import StepExecution
from tests.support.training import LIMIT_S, ROOT, fields, penstock_run

torchvision: Any = pytest.importorskip("torchvision")
timm: Any = pytest.importorskip("timm")

# What those libraries and torch's compiler warn of is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

GPUS = torch.cuda.device_count()
PAGES = ROOT / "docs" / "how-to"
LAUNCHED = "operation by operation"
CLASSES, SIDE, EXAMPLES = 10, 64, 320

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=CLASSES),
    "vit_tiny": lambda: timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, img_size=SIDE, drop_path_rate=0.1
    ),
    "efficientnet_b0": lambda: timm.create_model(
        "efficientnet_b0", pretrained=False, num_classes=CLASSES, drop_rate=0.1, drop_path_rate=0.1
    ),
}


def pictures(seed: int) -> tuple[Array, Array]:
    """Noise of one of ten colours: float32 `[n, 3, 64, 64]`, and which colour."""
    colours = np.random.default_rng(1000).uniform(-1.5, 1.5, (CLASSES, 3, 1, 1))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, EXAMPLES)
    return (colours[labels] + rng.normal(0, 0.3, (EXAMPLES, 3, SIDE, SIDE))).astype(np.float32), labels


@pytest.mark.parametrize(
    ("name", "compiled"), [("resnet18", False), ("vit_tiny", False), ("efficientnet_b0", False), ("resnet18", True)]
)
def test_a_network_is_learned_by_captured_steps(name: str, compiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]()
    fitted = penstock.fit(
        network,
        train=pictures(0),
        validation=pictures(1),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        batch_size=32,
        epochs=10,
        precision="bf16",
        execution=StepExecution(compile=compiled),
        device="cuda",
    )
    said = capsys.readouterr().out
    assert f"Training {type(network).__name__}: step 100/100" in said
    assert LAUNCHED not in said
    state = fitted.network.state_dict()
    assert list(state) == list(network.state_dict())
    assert all(tensor.isfinite().all() for tensor in state.values())
    losses = [line["validation_loss"] for line in fitted.history]
    assert len(losses) == 10
    assert all(map(math.isfinite, losses))
    # Who guesses has log(10) = 2.3.
    assert fitted.metrics["loss"] < 0.5 * math.log(CLASSES), losses
    assert fitted.history[-1]["train_loss"] < fitted.history[0]["train_loss"]
    # They are the library's: a network of its own takes them, and gives the same.
    other = NETWORKS[name]().eval()
    other.load_state_dict({key: tensor.cpu() for key, tensor in state.items()})
    inputs = torch.from_numpy(pictures(2)[0][:4])
    with torch.inference_mode():
        torch.testing.assert_close(fitted.network.cpu()(inputs), other(inputs), rtol=1e-3, atol=1e-3)


def titled(page: str, title: str) -> str:
    """A file that a page shows."""
    found = re.search(rf'```python title="{title}"\n(.*?)```', (PAGES / page).read_text(), re.DOTALL)
    assert found, f"{page} shows no {title}"
    return found[1]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_the_application_of_the_page_is_trained_on_two(tmp_path: Path) -> None:
    for page, title in (("data.md", "draw.py"), ("train.md", "resnet.py")):
        (tmp_path / title).write_text(titled(page, title))
    subprocess.run([sys.executable, "draw.py"], check=True, timeout=LIMIT_S, cwd=tmp_path)
    run = tmp_path / "run"
    done = penstock_run("train", "resnet.py", "--out", "run", "--gpus", 2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Training on 2 processes" in done.stdout
    assert LAUNCHED not in done.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_loss"] for line in lines]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), losses
    assert fields(run)["state"] == "finished"
    with safe_open(run / "bundle" / "weights.safetensors", "pt") as weights:
        names = set(weights.keys())
    own = {f"network.{name}" for name in torchvision.models.resnet18(num_classes=2).state_dict()}
    assert names == own | {"mean", "deviation"}
