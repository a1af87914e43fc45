"""Networks and methods of the training benchmark: Penstock's step, and the DDP steps that it is compared with."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from penstock.core.errors import BenchError
from penstock.models.alexnet import AlexNet
from penstock.models.mlp import MLP
from penstock.models.resnet import ResNet50
from penstock.models.vgg import VGG16
from penstock.models.vit import ViT
from penstock.train.placement import Placement, Placements

Method = Literal["penstock", "ddp", "captured ddp"]
METHODS: tuple[Method, ...] = ("penstock", "ddp", "captured ddp")

SIDE = 224
CLASSES = 1000
# Krizhevsky's hybrid: the fully connected layers of the classifier, in torchvision's order, are tensor parallel.
_HYBRID = {"classifier.1": Placement(kind="column-parallel"), "classifier.4": Placement(kind="row-parallel")}
_VGG_HYBRID = {"classifier.0": Placement(kind="column-parallel"), "classifier.3": Placement(kind="row-parallel")}
_HEAD = {"head": Placement(kind="vocab-parallel")}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """A network of the training benchmark.

    Args:
        make: Returns the module.
        title: Its common name.
        input_shape: Shape of one raw uint8 input.
        classes: Number of outputs.
        placements: Penstock's placements over several GPUs.
        unit: Name of an example.
    """

    make: Callable[[], nn.Module]
    title: str
    input_shape: tuple[int, ...]
    classes: int
    placements: Placements | Literal["auto"] = field(default_factory=dict)
    unit: str = "images"


def _wide(classes: int) -> Callable[[], nn.Module]:
    return partial(MLP, inputs=512, hidden=(512, 512), classes=classes, activation="relu")


_PICTURE = (SIDE, SIDE, 3)
HEAD_CLASSES = 1_400_000
MODELS: Mapping[str, BenchModel] = {
    "alexnet": BenchModel(make=AlexNet, title="AlexNet-OWT", input_shape=_PICTURE, classes=CLASSES, placements=_HYBRID),
    "vgg16": BenchModel(make=VGG16, title="VGG-16", input_shape=_PICTURE, classes=CLASSES, placements=_VGG_HYBRID),
    "resnet50": BenchModel(make=ResNet50, title="ResNet-50", input_shape=_PICTURE, classes=CLASSES),
    "vit_b16": BenchModel(make=ViT, title="ViT-B/16", input_shape=_PICTURE, classes=CLASSES),
    "head_1_4m": BenchModel(
        make=_wide(HEAD_CLASSES),
        title="MLP with 1.4M classes",
        input_shape=(512,),
        classes=HEAD_CLASSES,
        placements=_HEAD,
        unit="samples",
    ),
    # Small enough for a CPU.
    "mlp": BenchModel(
        make=_wide(96), title="small MLP", input_shape=(512,), classes=96, placements="auto", unit="samples"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """One network trained by one method.

    Args:
        model: A key of `MODELS`.
        batch: Global batch, in examples.
        method: One of `METHODS`.
        compiled: Compile the network with torch.compile.
        data_parallel: Make every layer data-parallel, for Penstock.
        placements: Placements that replace the model's.
        changes: Other fields of Penstock's recipe. For DDP: all-reduce gradients in bf16 (`hook`; by default only
            without capture), and compile the wrapped network (`outside`), so that torch splits it by DDP's buckets.
        on: Numbers of GPUs on which it is measured; all requested ones if empty.
    """

    model: str
    batch: int
    method: Method
    compiled: bool = False
    data_parallel: bool = False
    placements: Mapping[str, Mapping[str, Any]] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    on: Sequence[int] = ()

    @property
    def label(self) -> str:
        """The method in words."""
        said = self.method + (", compiled" if self.compiled else "") + (", data-parallel" if self.data_parallel else "")
        return said + "".join(f", {name}={value}" for name, value in self.changes.items())

    def layer_placements(self) -> Placements | Literal["auto"]:
        """Return Penstock's placements."""
        if self.placements is not None:
            return {name: Placement(**fields) for name, fields in self.placements.items()}
        return {} if self.data_parallel else MODELS[self.model].placements


def read_cases(file: Path) -> list[TrainingCase]:
    """Read cases from a JSON list of their fields.

    Raises:
        BenchError: The file cannot be read, or holds something else.
    """
    try:
        cases = [TrainingCase(**fields) for fields in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{file} is not a JSON list of cases ({error}).") from None
    for case in cases:
        if case.model not in MODELS or case.method not in METHODS:
            raise BenchError(
                f"{file} has {case.model!r} by {case.method!r}; there are {', '.join(MODELS)} by {', '.join(METHODS)}."
            )
    return cases


def all_cases(
    models: Iterable[str], batches: Sequence[int], methods: Sequence[str], compiled: bool | None
) -> list[TrainingCase]:
    """Combine networks, global batches and methods; compiled and eager where `compiled` is None."""
    return [
        TrainingCase(model=model, batch=batch, method=method, compiled=each)
        for model in models
        for batch in batches
        for method in METHODS
        if method in methods
        for each in ((False, True) if compiled is None else (compiled,))
    ]
