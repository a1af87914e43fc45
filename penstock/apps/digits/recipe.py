"""Training recipe of the digits: scikit-learn's 1,797 handwritten digits, a fixed third of them held out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from penstock.core.spec import Array
from penstock.train.recipe import ArraySet, Data, Recipe, Selection, StepExecution, accuracy

# B batch, H height, W width

SIDE = 28
HELD_OUT = 1 / 3
VALIDATION = 1 / 10
SPLIT_SEED = 0
PEAK_RATE = 0.1


def recipe() -> Recipe:
    """Sixty epochs of SGD with one cycle of the learning rate, over batches that are rotated, sheared and re-inked."""
    return Recipe(
        data=digits,
        loss=partial(F.cross_entropy, label_smoothing=0.05),
        optimizer=partial(SGD, lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=one_cycle,
        metrics={"accuracy": accuracy},
        selection=Selection(metric="loss", mode="min"),
        batch_size=64,
        epochs=60,
        augment=augment,
        execution=StepExecution(threads=1),
    )


def digits() -> Data:
    """A fixed third as the test set; a tenth of the rest as the validation set, the others to train on."""
    inputs, targets = digit_images()
    rest, test = split(targets, HELD_OUT)
    train, validation = (rest[part] for part in split(targets[rest], VALIDATION))
    train, validation, test = (
        ArraySet(inputs=inputs[part], targets=targets[part]) for part in (train, validation, test)
    )
    return Data(train=train, validation=validation, test=test)


def digit_images() -> tuple[Array, Array]:
    """scikit-learn's digits enlarged to uint8 `[1797, 28, 28]`, and their labels `[1797]`.

    The data set's own pictures are 8 x 8 with ink from 0 to 16.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    grey = np.round(found.data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in grey]
    return np.stack([np.asarray(image) for image in large]), found.target.astype(np.int64)


def split(targets: Array, share: float) -> tuple[Array, Array]:
    """Indices to train on and held-out ones: a fixed, stratified split."""
    from sklearn.model_selection import train_test_split

    indices = np.arange(len(targets))
    train, held_out = train_test_split(indices, test_size=share, stratify=targets, random_state=SPLIT_SEED)
    return np.sort(train), np.sort(held_out)


def one_cycle(optimizer: Optimizer, steps: int) -> OneCycleLR:
    """Warm up to the peak rate over the first fifth of the steps, then decay by a cosine."""
    # The momentum is constant, because a captured step cannot change it.
    return OneCycleLR(optimizer, PEAK_RATE, total_steps=steps + 1, pct_start=0.2, cycle_momentum=False)


def augment(pixels_BHW: Tensor, targets_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rotate, shear, stretch and shift each picture a little, and change the width of its strokes."""
    count, device = len(pixels_BHW), pixels_BHW.device

    def sample(draw: Callable[..., Tensor], *shape: int) -> Tensor:
        # Drawn on the generator's device, so that the numbers are the same on every device.
        return draw(*shape, generator=generator, device=generator.device).to(device)

    def uniform(limit: float) -> Tensor:
        return (sample(torch.rand, count) * 2 - 1) * limit

    angle, shear = uniform(0.2), uniform(0.2)
    wide, high = 1 + uniform(0.15), 1 + uniform(0.15)
    row_x = torch.stack([angle.cos() * wide, (shear - angle.sin()) * high, uniform(0.12)], 1)
    row_y = torch.stack([angle.sin() * wide, angle.cos() * high, uniform(0.12)], 1)
    grid = F.affine_grid(torch.stack([row_x, row_y], 1), [count, 1, SIDE, SIDE], align_corners=False)
    ink = F.grid_sample(pixels_BHW[:, None].float() / 255, grid, align_corners=False)
    pen = sample(torch.rand, count, 1, 1, 1)
    thick, thin = F.max_pool2d(ink, 3, 1, 1), -1.3 * F.max_pool2d(-ink, 3, 1, 1)
    ink = torch.where(pen < 0.15, thick, torch.where(pen > 0.85, thin, ink)).clamp(0, 1)
    ink = ink ** uniform(0.4).exp()[:, None, None, None]
    ink = ink + sample(torch.randn, *ink.shape) * 0.03
    return (ink[:, 0] * 255).clamp(0, 255), targets_B
