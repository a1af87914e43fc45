"""Training recipe of image classification: random views, mixup, and an EMA of the weights."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from penstock.apps.images import photographs
from penstock.apps.images.app import LABELS
from penstock.apps.images.report import write_report
from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.data.augment import mixup
from penstock.train.data.camera_views import Distortion, Views, small_rgba
from penstock.train.data.picture_layouts import find_pictures, split_pictures
from penstock.train.data.readers import OnBad
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.recipe import Data, EMASettings, Loading, Recipe, Selection, StepExecution, accuracy
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.declared_schedule import Schedule

# B batch, H height, W width, n examples, K classes

STEPS = 1_400
TOP = 5
VALIDATIONS = 40
RAW_EXAMPLES, RAW_SIDE = 16, 200
# For a user's pictures, which vary by themselves.
OWN = Distortion(least_area=0.3, turn_degrees=10, perspective=0.05, light=0.3, blur=1.0, mirror=True)


def recipe() -> Recipe:
    """Recipe of 1,400 steps over random views of the default photographs."""
    made = images_recipe(default_data, photographs.raw_examples, LABELS, steps=STEPS, smoothing=0.02, mixing=0.1)
    # One thread, because the second core makes the views.
    return replace(made, execution=StepExecution(threads=1))


def default_data() -> Data:
    """Views of the default photographs."""
    return Data(
        train=photographs.training_views(), validation=photographs.validation_views(), test=photographs.test_views()
    )


def images_recipe(
    data: Callable[[], Data],
    raw_examples: Callable[[], list[Array]],
    labels: tuple[str, ...],
    *,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    rate: float = 3e-3,
    smoothing: float = 0.1,
    mixing: float = 0.2,
    bad_examples: OnBad = "stop",
) -> Recipe:
    """AdamW with warm-up and cosine decay, mixup, label smoothing and an EMA of the weights.

    Args:
        data: The examples, uint8 pictures and the indices of their labels.
        raw_examples: Some whole pictures, uint8 `[H, W, 4]`, that become golden examples.
        labels: The application's labels.
        epochs: Passes over the examples.
        steps: Number of steps, instead of epochs.
        batch_size: Examples per step.
        rate: Peak learning rate.
        smoothing: Share of each target that is spread over all labels.
        mixing: Mixup's alpha; a larger one mixes two pictures more evenly.
        bad_examples: Policy for unreadable pictures, see `Recipe`.
    """
    return Recipe(
        data=data,
        raw_examples=raw_examples,
        loss=CrossEntropy(smoothing),
        # No weight decay on biases and normalization weights.
        optimizer=Optimizer("adamw", lr=rate, weight_decay=0.05, decay_vectors=False),
        schedule=Schedule("cosine", warmup=0.1),
        metrics={"accuracy": accuracy, "top5": partial(top_accuracy, count=TOP)},
        selection=Selection(metric="loss", every_epochs=max(1.0, (epochs or 0) / VALIDATIONS)),
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        augment=mixup(len(labels), mixing),
        # An epoch of few pictures is over in a few steps.
        ema=EMASettings(decay=0.99, warm_up=True),
        loading=Loading(bad_examples=bad_examples),
        calibrate=partial(write_report, labels=labels),
    )


def folder_data(folder: str | Path, labels: tuple[str, ...], side: int, distortion: Distortion = OWN) -> Data:
    """The pictures of a folder: random views to train on, centre squares for validation and test.

    Args:
        folder: See `penstock.train.data.picture_layouts.find_pictures`.
        labels: The application's labels; those of the folder must be among them.
        side: Side of the network's square input, in pixels.
        distortion: Random distortion of training pictures.
    """
    parts = split_pictures(find_pictures(folder))
    return Data(
        train=Views(parts["train"], labels, side, distortion=distortion),
        validation=Views(parts["validation"], labels, side),
        test=Views(parts["test"], labels, side),
    )


def raw_pictures(folder: str | Path) -> list[Array]:
    """Some held-out pictures, downscaled, as `decode` returns them: uint8 `[H, W, 4]`.

    Args:
        folder: See `penstock.train.data.picture_layouts.find_pictures`.

    Raises:
        BadExample: None of them can be read.
    """
    held_out = split_pictures(find_pictures(folder))["validation"]
    chosen = held_out[:: max(1, len(held_out) // RAW_EXAMPLES)][:RAW_EXAMPLES]
    raws: list[Array] = []
    for index, picture in enumerate(chosen):
        # The recipe's policy for unreadable pictures applies to training; here they are skipped.
        with suppress(BadExample):
            raws.append(small_rgba(picture, most=RAW_SIDE + index))
    return raws or [small_rgba(chosen[0], most=RAW_SIDE)]


def top_accuracy(logits: Tensor, labels: Tensor, count: int) -> float:
    """Share of rows `[n, K]` whose label is among the `count` likeliest."""
    count = min(count, logits.shape[1])
    return (logits.topk(count, 1).indices == labels[:, None]).any(1).double().mean().item()
