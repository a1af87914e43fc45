"""Training recipe of the mitotic figures: a focal loss over maps of generated slides."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.apps.mitosis.app import DENSE
from penstock.apps.mitosis.evaluate import Matches, match
from penstock.apps.mitosis.style import FIRST
from penstock.apps.mitosis.tiles import SlideTiles, generated_slides
from penstock.core.spec import Array
from penstock.train.recipe import Data, EMASettings, Predictions, Recipe, Selection
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.declared_schedule import Schedule

# B tiles, h, w cells of a map, K kinds

RATE = 3e-3
STEPS = 2_400
BATCH = 4
VALIDATIONS = 6
TRAIN_SLIDES, TRAIN_SIDE = 40, 1536
# Nine tiles of a slide.
HELD_OUT_SLIDES, HELD_OUT_SIDE = 6, 1536
# Slides of different sets have different seeds.
TRAIN_SEED, VALIDATION_SEED, TEST_SEED = 1_000, 500_000, 600_000
# Finds are matched from this score on, to choose a threshold.
LEAST_SCORE = 0.05
# Exponents of Law and Deng 2018, "CornerNet", equation 1.
ALPHA, BETA = 2, 4


def recipe() -> Recipe:
    """Recipe of 2,400 steps over generated slides."""
    return mitosis_recipe(default_data, steps=STEPS)


def mitosis_recipe(data: Callable[[], Data], *, steps: int, batch_size: int = BATCH) -> Recipe:
    """AdamW with warm-up and cosine decay, and an EMA of the weights, selected by F1.

    Args:
        data: Tiles of slides with their maps, see `SlideTiles`.
        steps: Number of steps.
        batch_size: Tiles a step.
    """
    return Recipe(
        data=data,
        loss=focal_loss,
        optimizer=Optimizer("adamw", lr=RATE, weight_decay=0.02),
        schedule=Schedule("cosine", warmup=0.1),
        metrics={"f1": best_f1},
        selection=Selection(metric="f1", mode="max", every_epochs=1.0),
        batch_size=batch_size,
        steps=steps,
        ema=EMASettings(decay=0.99, warm_up=True),
        calibrate=calibrate,
    )


def default_data() -> Data:
    """Generated slides of the first style."""
    train = generated_slides(TRAIN_SLIDES, TRAIN_SIDE, FIRST, first_seed=TRAIN_SEED)
    held_out = [
        SlideTiles(generated_slides(HELD_OUT_SLIDES, HELD_OUT_SIDE, FIRST, first_seed=seed))
        for seed in (VALIDATION_SEED, TEST_SEED)
    ]
    tiles_of_each = STEPS * BATCH // (VALIDATIONS * TRAIN_SLIDES)
    return Data(train=SlideTiles(train, tiles_of_each), validation=held_out[0], test=held_out[1])


def focal_loss(logits_BhwK: Tensor, target_Bhw: Tensor) -> Tensor:
    """Focal loss of maps with Gaussians around the centres: Law and Deng 2018, "CornerNet", equation 1."""
    logits_Bhw = logits_BhwK[..., 0].float()
    score_Bhw = logits_Bhw.sigmoid()
    is_centre_Bhw = target_Bhw == 1
    hit = (1 - score_Bhw) ** ALPHA * F.logsigmoid(logits_Bhw)
    miss = (1 - target_Bhw) ** BETA * score_Bhw**ALPHA * F.logsigmoid(-logits_Bhw)
    total = torch.where(is_centre_Bhw, hit, miss).sum()
    return -total / is_centre_Bhw.sum().clamp(min=1)


def best_f1(logits_BhwK: Tensor, target_Bhw: Tensor) -> float:
    """F1 of all tiles together, at the threshold that is best for them."""
    return matches_of(logits_BhwK, target_Bhw).best_threshold()[1]


def matches_of(logits_BhwK: Tensor, target_Bhw: Tensor) -> Matches:
    """Match the finds of each tile with its figures, whose centres are known to half a cell."""
    dense = replace(DENSE, threshold=LEAST_SCORE)
    scores_BhwK = logits_BhwK.float().sigmoid().numpy()
    return Matches.joined(
        [
            match(dense.finds([dense.cells_above(map_hwK)]), _centres(target_hw))
            for map_hwK, target_hw in zip(scores_BhwK, target_Bhw.numpy(), strict=True)
        ]
    )


def _centres(target_hw: Array) -> Array:
    rows_n, columns_n = np.nonzero(target_hw == 1)
    return (np.stack([columns_n, rows_n], 1) + 0.5) * DENSE.stride


def calibrate(run: Path, validation: Predictions, test: Predictions) -> dict[str, Tensor]:
    """Shift the logits, so that one half is the threshold with the best F1 of the validation set; write report.json.

    Args:
        run: The run's folder.
        validation: Logits and target maps.
        test: The same, not used for the threshold.
    """
    threshold, f1 = matches_of(*validation).best_threshold()
    threshold = min(max(threshold, LEAST_SCORE), 1 - LEAST_SCORE)
    held_out = matches_of(*test)
    report = {
        "threshold": threshold,
        "validation_f1": f1,
        "test_f1": held_out.f1(threshold),
        "test_figures": held_out.figures,
    }
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return {"shift": torch.tensor(-math.log(threshold / (1 - threshold)))}
