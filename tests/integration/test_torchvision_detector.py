"""A detector of torchvision as docs/how-to/detect.md declares it: its own boxes, exported, and trained a step."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.apps.detect.precision import iou
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine
from penstock.export.pack_writer import export_pack
from penstock.train.recipe import ArraySet, Data
from penstock.train.run import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "detect.md"
SIDE = 320


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FoundApplication:
    pytest.importorskip("torchvision", reason="the package torchvision is not installed")
    shown = re.search(r'```python title="ssd.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert shown is not None
    file = tmp_path_factory.mktemp("ssd") / "ssd.py"
    file.write_text(shown[1])
    return find_application(str(file))


def pictures(count: int) -> Array:
    """Blurred noise, so that places differ."""
    noise = torch.rand(count, 3, 20, 20, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(255 * noise, (SIDE, SIDE), mode="bicubic").clamp(0, 255).byte().numpy()


def raws() -> list[Array]:
    opaque = np.full((2, SIDE, SIDE, 1), 255, np.uint8)
    return list(np.concatenate([pictures(2).transpose(0, 2, 3, 1), opaque], 3))


def awake(found: FoundApplication) -> Any:
    """A network whose scores differ from anchor to anchor, though it learned nothing."""
    torch.manual_seed(0)
    network: Any = found.model()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        network.train()(torch.from_numpy(pictures(8)).float())
        for part in network.model.head.classification_head.module_list:
            part[1].weight *= 3
    return network.eval()


def same_boxes(one: dict[str, Array], other: dict[str, Array]) -> Array:
    """Whether each box of one answer is each of another, `[n, m]`."""
    close = np.abs(one["scores"][:, None] - other["scores"]) < 1e-4
    return close & (one["classes"][:, None] == other["classes"]) & (iou(one["boxes"], other["boxes"]) > 0.99)


def test_its_boxes_are_those_of_torchvision_in_all_places(found: FoundApplication, tmp_path: Path) -> None:
    network = awake(found)
    penstock.Bundle.write(found, network, raws(), to=tmp_path / "bundle")
    predictor = penstock.load(tmp_path / "bundle")
    answers = [predictor.predict(each) for each in raws()]
    network.model.score_thresh = 0.05
    with torch.inference_mode():
        own = network.model([torch.from_numpy(each / np.float32(255)) for each in pictures(2)])
    for answer, theirs in zip(answers, own, strict=True):
        named = {"boxes": theirs["boxes"].numpy(), "classes": theirs["labels"].numpy() - 1, "scores": theirs["scores"]}
        same = same_boxes(answer, {name: np.asarray(each) for name, each in named.items()})
        assert min(same.shape) > 3
        # Those with the largest scores; of equal ones either may come first.
        assert same[:20].any(1).all()
        assert same[:, :20].any(0).all()
    result = export_pack(tmp_path / "bundle", tmp_path / "pack")
    assert result.difference < 1e-2
    named = PackEngine(read_pack(tmp_path / "pack")).predict({"raw": raws()[0]})
    np.testing.assert_allclose(named["scores"][:3], answers[0]["scores"][:3], atol=1e-3)


def test_it_is_trained_by_the_loss_of_torchvision(found: FoundApplication, tmp_path: Path) -> None:
    boxes = np.zeros((2, 3, 4), np.float32)
    boxes[:, 0] = 40, 60, 200, 260
    classes = np.array([[1, -1, -1], [-1, -1, -1]])
    few = ArraySet(inputs=pictures(2), targets={"boxes": boxes, "classes": classes})
    recipe = replace(
        found.recipe(), data=lambda: Data(train=few, validation=few), raw_examples=raws, batch_size=2, steps=2
    )
    result = train(found, tmp_path / "run", recipe, overrides={}, quiet=True)
    assert 0 < result.metrics["loss"] < 100
