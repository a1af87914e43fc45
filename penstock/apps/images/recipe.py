"""How things in pictures are learned: other views of them at every step, mixed, and a mean of the weights."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from penstock.apps.images import photographs
from penstock.apps.images.photographs import LABELS
from penstock.apps.images.report import write_report
from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.augment import cross_entropy, mixup
from penstock.train.pictures import find_pictures, split_pictures
from penstock.train.reading import OnBad
from penstock.train.recipe import Data, Recipe, accuracy
from penstock.train.schedules import warm_up_cosine
from penstock.train.views import Distortion, Views, small_rgba

# B batch, H height, W width, n examples, K classes

STEPS = 1_400
TOP = 5
VALIDATIONS = 40
RAW_EXAMPLES, RAW_SIDE = 16, 200
# Of a user's own pictures, which differ by themselves.
OWN = Distortion(least_area=0.3, turn_degrees=10, perspective=0.05, light=0.3, blur=1.0, mirror=True)


def recipe() -> Recipe:
    """Fourteen hundred steps over views of the default photographs, never two of them the same."""
    made = images_recipe(default_data, photographs.raw_examples, LABELS, steps=STEPS, smoothing=0.02, mixing=0.1)
    # The other core makes the views.
    return replace(made, threads=1)


def default_data() -> Data:
    """Views of the default photographs."""
    return Data(train=photographs.learned(), validation=photographs.chosen_by(), test=photographs.tested_on())


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
    """AdamW with a warm-up and a cosine, mixup, smoothed labels and the running mean of the weights.

    Args:
        data: The examples, uint8 pictures and the numbers of their labels.
        raw_examples: Some whole pictures, uint8 `[H, W, 4]`, that become golden examples.
        labels: The application's.
        epochs: How often every example is seen.
        steps: How many steps are taken, instead of epochs.
        batch_size: Examples a step.
        rate: The highest learning rate.
        smoothing: The share of each target that is spread over all labels.
        mixing: Mixup's alpha: the larger, the more evenly are two pictures mixed.
        bad_examples: At a picture that cannot be read, see `Recipe`.
    """
    return Recipe(
        data=data,
        raw_examples=raw_examples,
        loss=cross_entropy(smoothing),
        optimizer=partial(adamw, rate=rate),
        schedule=warm_up_cosine(0.1),
        metrics={"accuracy": accuracy, "top5": partial(top_accuracy, count=TOP)},
        best="loss",
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        augment=mixup(len(labels), mixing),
        # An epoch of few pictures is over in a few steps.
        validate_every_epochs=max(1.0, (epochs or 0) / VALIDATIONS),
        average_decay=0.99,
        average_warm_up=True,
        bad_examples=bad_examples,
        finish=partial(write_report, labels=labels),
    )


def folder_data(folder: str | Path, labels: tuple[str, ...], side: int, distortion: Distortion = OWN) -> Data:
    """The pictures of a folder: learned from in views of chance, held out in their middle squares.

    Args:
        folder: See `penstock.train.pictures.find_pictures`.
        labels: The application's, which those of the folder must be among.
        side: Of the network's pictures, in pixels.
        distortion: What may happen to a picture that is learned from.
    """
    parts = split_pictures(find_pictures(folder))
    return Data(
        train=Views(parts["train"], labels, side, distortion=distortion),
        validation=Views(parts["validation"], labels, side),
        test=Views(parts["test"], labels, side),
    )


def raw_pictures(folder: str | Path) -> list[Array]:
    """Some of the pictures that are held out, small, as `decode` gives them: uint8 `[H, W, 4]`.

    Args:
        folder: See `penstock.train.pictures.find_pictures`.

    Raises:
        BadExample: None of them can be read.
    """
    held_out = split_pictures(find_pictures(folder))["validation"]
    chosen = held_out[:: max(1, len(held_out) // RAW_EXAMPLES)][:RAW_EXAMPLES]
    raws: list[Array] = []
    for index, picture in enumerate(chosen):
        # Whether those that cannot be read are passed over, the recipe has decided where they are learned from.
        with suppress(BadExample):
            raws.append(small_rgba(picture, most=RAW_SIDE + index))
    return raws or [small_rgba(chosen[0], most=RAW_SIDE)]


def adamw(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """Adam with decoupled weight decay, which leaves alone what scales and shifts."""
    every = list(parameters)
    scaled = [parameter for parameter in every if parameter.ndim > 1]
    other = [parameter for parameter in every if parameter.ndim <= 1]
    groups = [{"params": scaled, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}]
    return AdamW(groups, lr=rate)


def top_accuracy(logits: Tensor, labels: Tensor, count: int) -> float:
    """The share of rows `[n, K]` of which the label is among the likeliest so many."""
    count = min(count, logits.shape[1])
    return (logits.topk(count, 1).indices == labels[:, None]).any(1).double().mean().item()
