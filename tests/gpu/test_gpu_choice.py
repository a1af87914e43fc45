"""Networks of other libraries on a GPU: every precision, the choice of `auto`, and compiled batches."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Application, Bundle, TensorSpec
from penstock.core.bundles.bundle import BundleFiles, read_bundle
from penstock.core.errors import GoldenMismatch
from penstock.core.spec import Array
from penstock.models.image_classifier import ImageNetwork
from penstock.models.resnet import ResNet50
from penstock.runtime.execution import Execution
from penstock.runtime.executor import StepInput
from penstock.runtime.gpu.compile_ahead import CompileAhead
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.gpu.gpu_choice import CHOICES, gpu_runnable
from penstock.runtime.gpu.precision import TOLERANCES
from penstock.runtime.load import as_found
from penstock.runtime.runnable import Runnable

torchvision: Any = pytest.importorskip("torchvision")
timm: Any = pytest.importorskip("timm")
transformers: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIDE, CLASSES, EXAMPLES = 64, 10, 12


class Pictures(nn.Module):
    """Pixels in, scores out; the network is somebody else's and knows nothing of precisions."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.05)
            if isinstance(layer, nn.BatchNorm2d):
                # The mean over all batches.
                layer.momentum = None
        weaken_branches(network)
        with torch.no_grad():
            # Statistics of the pictures, without which deep networks give numbers below the range of fp16.
            self.train()(torch.randint(0, 256, (32, SIDE, SIDE, 3), dtype=torch.uint8))
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        if isinstance(self.network, ImageNetwork):
            return self.network(pixels)
        found = self.network(pixels.float().permute(0, 3, 1, 2) / 127.5 - 1)
        return getattr(found, "logits", found)


def weaken_branches(network: nn.Module) -> None:
    """Weaken residual branches, as training does.

    At full strength an untrained ResNet-50 amplifies the rounding of bf16 to a third of its scores, in plain PyTorch
    too.
    """
    for layer in network.modules():
        last = getattr(layer, "bn3", None) or getattr(layer, "bn2", None)
        if getattr(layer, "use_res_connect", False):
            last = list(layer.get_submodule("block").children())[-1].get_submodule("1")
        if isinstance(last, nn.BatchNorm2d):
            nn.init.constant_(last.weight, 0.2)


def hugging_face() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=SIDE, patch_size=16, hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_labels=CLASSES
    )
    return transformers.ViTForImageClassification(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "penstock": lambda: ResNet50(CLASSES),
    "torchvision": lambda: torchvision.models.resnet18(num_classes=CLASSES),
    "efficientnet": lambda: torchvision.models.efficientnet_b0(num_classes=CLASSES),
    "timm": lambda: timm.create_model("convnext_atto", pretrained=False, num_classes=CLASSES),
    "hugging_face": hugging_face,
}


def bundled(network: nn.Module, folder: Path, labels: bool = False) -> tuple[BundleFiles, Application]:
    names = tuple(f"class {index}" for index in range(CLASSES)) if labels else ()
    application = Application(
        name="pictures",
        description="Pictures.",
        input=TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="pixels"),
        output=TensorSpec(dtype="float32", shape=(CLASSES,), meaning="scores", labels=names),
        model=lambda: network,
    )
    pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SIDE, SIDE, 3), np.uint8)
    Bundle.write(as_found(application), network.eval(), pixels, to=folder / "bundle")
    return read_bundle(folder / "bundle"), application


def served(files: BundleFiles, application: Application, folder: Path, **how: Any) -> Runnable:
    given: dict[str, Any] = {"cache": folder / "cache", "cores": 4, "device": "cuda:0", "max_rows": 16, **how}
    return gpu_runnable(files, as_found(application), Execution(**given), slots=64)


def answers(runnable: Runnable, inputs: Array) -> Array:
    assert isinstance(runnable.executor, CudaGraphExecutor)
    rows = len(inputs)
    ones = np.ones(rows, np.int64)
    batch = StepInput(slots_B=np.arange(rows), chunk_B=inputs, length_B=ones, fresh_B=ones > 0)
    return runnable.executor.step(batch).output_B.copy()


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_run_in_every_precision_as_they_come(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    files, application = bundled(Pictures(NETWORKS[name]()), tmp_path)
    scale = float(np.abs(files.golden.outputs).max())
    for precision, tolerance in (("fp32", 1e-4), *TOLERANCES.items()):
        runnable = served(files, application, tmp_path, precision=precision)
        found = answers(runnable, files.golden.inputs)
        assert np.abs(found - files.golden.outputs).max() <= tolerance * scale, precision
        assert runnable.runs_by.startswith(f"torch in {precision}")


def test_auto_takes_the_fastest_that_names_the_same_labels_and_remembers_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    files, application = bundled(Pictures(ResNet50(CLASSES)), tmp_path, labels=True)
    with caplog.at_level(logging.INFO):
        runnable = served(files, application, tmp_path, precision="auto", max_rows=None)
    # 64 pictures of 64 x 64 through ResNet-50 are faster in a reduced precision, unless a label changes.
    (remembered,) = (tmp_path / "cache" / "gpu").glob("*/" + CHOICES.format(precision="auto"))
    way = json.loads(remembered.read_text())
    assert runnable.runs_by.startswith(f"torch in {way['precision']}")
    (said,) = [each for each in caplog.messages if "a batch takes" in each]
    assert "fp32" in said
    caplog.clear()
    again = served(files, application, tmp_path, precision="auto", max_rows=None)
    assert again.runs_by == runnable.runs_by
    assert not [each for each in caplog.messages if "a batch takes" in each]


class Doubled(nn.Module):
    """Loses everything in bf16: the difference of two large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIDE * SIDE * 3, CLASSES)
        nn.init.constant_(self.out.bias, 1000.0)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.out(pixels.float().flatten(1) / 255) - 1000.0


def test_a_precision_that_loses_too_much_is_refused_and_auto_leaves_it_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    files, application = bundled(Doubled(), tmp_path)
    with pytest.raises(GoldenMismatch, match=r"in bf16.* on cuda:0, the network's answers differ"):
        served(files, application, tmp_path, precision="bf16")
    runnable = served(files, application, tmp_path, precision="auto")
    assert "bf16" not in runnable.runs_by


def test_compiled_batches_replace_the_graphs_while_they_are_used(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # From a file, because the compiler's process finds the application by its reference.
    file = tmp_path / "app.py"
    file.write_text(
        "import penstock\n"
        "from penstock import Application, TensorSpec\n"
        "from penstock.models.resnet import ResNet50\n"
        "app = Application(name='pictures', description='Pictures.',\n"
        f"    input=TensorSpec(dtype='uint8', shape=({SIDE}, {SIDE}, 3), meaning='pixels'),\n"
        f"    output=TensorSpec(dtype='float32', shape=({CLASSES},), meaning='scores'),\n"
        f"    model=lambda: ResNet50({CLASSES}))\n"
    )
    found = penstock.core.source_files.find_application.find_application(str(file))
    pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SIDE, SIDE, 3), np.uint8)
    Bundle.write(found, found.model().eval(), pixels, to=tmp_path / "bundle")
    files = read_bundle(tmp_path / "bundle")
    how = Execution(cache=tmp_path / "cache", cores=8, device="cuda:0", max_rows=16, precision="bf16", compile=True)
    runnable = gpu_runnable(files, found, how, slots=64)
    before = answers(runnable, pixels)
    ahead = runnable.compile_ahead
    assert isinstance(ahead, CompileAhead)
    sizes = ahead.sizes(largest=8)
    assert sizes[0] == 8
    assert set(sizes) == {1, 2, 4, 8, 16}
    for batch in ahead.batches(sizes):
        assert batch.ms is not None, batch
        tolerance = 0.05 * np.abs(files.golden.outputs).max()
        for rows in (1, 3, EXAMPLES):
            np.testing.assert_allclose(answers(runnable, pixels[:rows]), before[:rows], atol=tolerance)
    assert ahead.reason == ""
    # The next start takes them from the cache.
    restarted = gpu_runnable(files, found, how, slots=64)
    # Its graphs are captured at the first batch.
    answers(restarted, pixels)
    again = restarted.compile_ahead
    assert isinstance(again, CompileAhead)
    assert [batch.rows for batch in again.batches(sizes)] == sizes
    assert again.reason == ""
