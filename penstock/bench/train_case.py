"""What is trained to see how fast it goes, and the ways of doing it: Penstock's, and those it is compared with."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from penstock.core.errors import BenchError
from penstock.train.placements import Placement, Placements

# P peers

Way = Literal["penstock", "ddp", "captured ddp"]
WAYS: tuple[Way, ...] = ("penstock", "ddp", "captured ddp")

SIDE = 224
CLASSES = 1000
# Of the fully connected layers' classifier, in torchvision's order: what Krizhevsky's hybrid cuts.
_HYBRID = {"classifier.1": Placement(kind="columns"), "classifier.4": Placement(kind="rows")}
_VGG_HYBRID = {"classifier.0": Placement(kind="columns"), "classifier.3": Placement(kind="rows")}
_HEAD = {"head": Placement(kind="classes")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A network that is trained.

    Args:
        make: Makes it.
        title: As people call it.
        input_shape: Of one raw input; they are uint8.
        classes: Its outputs.
        placements: How Penstock lays it out over several GPUs.
        unit: What one example is.
    """

    make: Callable[[], nn.Module]
    title: str
    input_shape: tuple[int, ...]
    classes: int
    placements: Placements | Literal["auto"] = field(default_factory=dict)
    unit: str = "images"


def _picture(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from penstock.models.alexnet import AlexNet
        from penstock.models.resnet import ResNet50
        from penstock.models.vgg import VGG16
        from penstock.models.vit import ViT

        return {"alexnet": AlexNet, "vgg16": VGG16, "resnet50": ResNet50, "vit_b16": ViT}[name]()

    return make


def _wide(classes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from penstock.models.mlp import MLP

        return MLP(inputs=512, hidden=(512, 512), classes=classes, activation="relu")

    return make


_PICTURE = (SIDE, SIDE, 3)
HEAD_CLASSES = 1_400_000
MODELS: Mapping[str, Model] = {
    "alexnet": Model(
        make=_picture("alexnet"), title="AlexNet-OWT", input_shape=_PICTURE, classes=CLASSES, placements=_HYBRID
    ),
    "vgg16": Model(
        make=_picture("vgg16"), title="VGG-16", input_shape=_PICTURE, classes=CLASSES, placements=_VGG_HYBRID
    ),
    "resnet50": Model(make=_picture("resnet50"), title="ResNet-50", input_shape=_PICTURE, classes=CLASSES),
    "vit_b16": Model(make=_picture("vit_b16"), title="ViT-B/16", input_shape=_PICTURE, classes=CLASSES),
    "head_1_4m": Model(
        make=_wide(HEAD_CLASSES),
        title="MLP with 1.4M classes",
        input_shape=(512,),
        classes=HEAD_CLASSES,
        placements=_HEAD,
        unit="samples",
    ),
    # Small enough for a CPU.
    "mlp": Model(make=_wide(96), title="small MLP", input_shape=(512,), classes=96, placements="auto", unit="samples"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to train one network.

    Args:
        model: Of `MODELS`.
        batch: Examples a step, over all GPUs.
        way: Who takes the step.
        compiled: Whether torch compiles the network.
        data_parallel: Whether Penstock lays every layer out by data, whatever the model says.
        placements: Instead of the model's.
        changes: Other fields of Penstock's recipe; of DDP's, whether gradients travel in bf16 (`hook`, else only where
            nothing is captured), and whether what is compiled is the wrapped network (`outside`), which lets torch part
            it by DDP's buckets.
        on: Of how many GPUs it is measured; of all that are asked for where empty.
    """

    model: str
    batch: int
    way: Way
    compiled: bool = False
    data_parallel: bool = False
    placements: Mapping[str, Mapping[str, Any]] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    on: Sequence[int] = ()

    @property
    def label(self) -> str:
        """The way, in words."""
        said = self.way + (", compiled" if self.compiled else "") + (", data-parallel" if self.data_parallel else "")
        return said + "".join(f", {name}={value}" for name, value in self.changes.items())

    def laid_out(self) -> Placements | Literal["auto"]:
        """Penstock's placements."""
        if self.placements is not None:
            return {name: Placement(**fields) for name, fields in self.placements.items()}
        return {} if self.data_parallel else MODELS[self.model].placements


def read_cases(file: Path) -> list[Case]:
    """Cases as a JSON list of their fields.

    Raises:
        BenchError: They cannot be read, or one is none.
    """
    try:
        cases = [Case(**fields) for fields in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{file} is no JSON list of cases ({error}).") from None
    for case in cases:
        if case.model not in MODELS or case.way not in WAYS:
            raise BenchError(
                f"{file} has {case.model!r} by {case.way!r}; there are {', '.join(MODELS)} by {', '.join(WAYS)}."
            )
    return cases
