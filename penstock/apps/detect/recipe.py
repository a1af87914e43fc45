"""Training recipe of the detector: drawn road scenes by default, or pictures with boxes of your own."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from penstock.apps.detect.app import LABELS, peaks
from penstock.apps.detect.drawn import drawn_set
from penstock.apps.detect.loss import augment, detection_loss
from penstock.apps.detect.precision import mean_average_precision
from penstock.core.spec import Array
from penstock.nn.peak_boxes import PeakBoxes
from penstock.train.recipe import ArraySet, Data, EMASettings, Recipe, Selection
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.declared_schedule import Schedule

# n pictures

SCENES = {"train": 4_000, "validation": 200, "test": 400}
STEPS = 2_600
PEAK_RATE = 3e-3
OVERLAP = 0.5
RAW_EXAMPLES = 12
PICTURES_AT_ONCE = 16


def recipe() -> Recipe:
    """AdamW with one cosine over mirrored scenes in other light, and an EMA of the weights."""
    return detect_recipe(drawn_scenes, raw_scenes)


def detect_recipe(
    data: Callable[[], Data],
    raw_examples: Callable[[], list[Array]],
    *,
    steps: int = STEPS,
    batch_size: int = 32,
    classes: int = len(LABELS),
    finish: Callable[[], PeakBoxes] = peaks,
) -> Recipe:
    """The recipe for any pictures with boxes.

    Args:
        data: The examples: pictures `[n, 3, H, W]` in 0..255, and as targets `boxes` and `classes`, see `drawn`.
        raw_examples: Some whole pictures, uint8 `[H, W, 4]`, that become golden examples.
        steps: Training steps.
        batch_size: Pictures for each step.
        classes: Number of classes.
        finish: Makes the module that finds the boxes, for the precision of a validation.
    """
    return Recipe(
        data=data,
        raw_examples=raw_examples,
        loss=partial(detection_loss, stride=finish().stride),
        # No weight decay on biases and normalization weights.
        optimizer=Optimizer("adamw", lr=PEAK_RATE, weight_decay=0.05, decay_vectors=False),
        schedule=Schedule("cosine", warmup=0.05),
        metrics={"map50": partial(map50, finish=finish, classes=classes)},
        selection=Selection(metric="map50", mode="max", every_epochs=5.0),
        batch_size=batch_size,
        steps=steps,
        precision="tf32",
        augment=augment,
        ema=EMASettings(decay=0.998, warm_up=True),
        clip_norm=10.0,
    )


def drawn_scenes() -> Data:
    """Drawn scenes; validation and test scenes are of other seeds."""
    return Data(**{part: _as_set(part, count) for part, count in SCENES.items()})


def _as_set(part: str, count: int) -> ArraySet:
    made = drawn_set(part, count)
    return ArraySet(inputs=made.pixels, targets={"boxes": made.boxes, "classes": made.classes})


def raw_scenes() -> list[Array]:
    """Some validation scenes as `decode` returns them, of several sizes."""
    import numpy as np
    from PIL import Image

    made = drawn_set("validation", RAW_EXAMPLES)
    raws: list[Array] = []
    for place, pixels in enumerate(made.pixels):
        picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).convert("RGBA")
        # A part of it in another size, and one picture without any object.
        width, height = picture.width - 9 * place, picture.height - 7 * place
        raws.append(np.asarray(picture.crop((0, 0, width, height)).resize((width - 3 * place, height + 5 * place))))
    raws[0] = np.full_like(raws[0], 128)
    return raws


def map50(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, finish: Callable[[], PeakBoxes], classes: int
) -> float:
    """Mean average precision at an overlap of a half, see `penstock.apps.detect.precision`."""
    boxes_of = finish()
    boxes, true = [], []
    for start in range(0, len(wanted["classes"]), PICTURES_AT_ONCE):
        part = slice(start, start + PICTURES_AT_ONCE)
        made = {name: tensor.cpu() for name, tensor in boxes_of(found["heat"][part], found["sides"][part]).items()}
        for row, count in enumerate(made["objects"].tolist()):
            boxes.append(tuple(made[name][row, :count].float().numpy() for name in ("boxes", "classes", "scores")))
    for each, kinds in zip(wanted["boxes"].cpu().numpy(), wanted["classes"].cpu().numpy(), strict=True):
        true.append((each[kinds >= 0], kinds[kinds >= 0]))
    return mean_average_precision(boxes, true, classes, OVERLAP)
