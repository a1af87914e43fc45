"""F1 of the mitotic figures on held-out generated slides of two styles, and of blobs on the same."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance.train.training_run import SEEDS, trained
from penstock.apps.mitosis.evaluate import Matches, match
from penstock.apps.mitosis.style import FIRST, SECOND, Style
from penstock.apps.mitosis.tiles import AnnotatedSlide, generated_slides
from penstock.core.pictures.dense import Find
from penstock.core.spec import Array

# H height, W width

SLIDES, SIDE = 8, 2048
# Other seeds than those of training, validation and test.
FIRST_SEED, SECOND_SEED, BLOB_SEED = 2_000_000, 3_000_000, 4_000_000
BLOB_SLIDES = 4
# Ten minutes of two cores.
TRAIN_CPU_S = 1_200.0
# What the blobs are tuned over: darkness of a pixel (in red, green, blue or the nuclear stain), sizes in pixels.
REDUCTION = 4
LIMITS = {"red": (70, 90, 110, 130), "green": (40, 60, 80, 100), "stain": (0.06, 0.09, 0.12, 0.16)}
SIGMAS = ((1.5, 3.0), (2.0, 4.0), (1.5, 6.0), (3.0, 6.0))


def f1() -> list[float]:
    """Return F1 on held-out slides of the style that was learned, for each seed of the training."""
    return [first for first, _ in _trained_f1()]


def second_style_f1() -> list[float]:
    """Return F1 on slides of a style that was never learned, for each seed of the training."""
    return [second for _, second in _trained_f1()]


def blob_f1() -> list[float]:
    """Return F1 of a threshold with blob detection on the held-out slides; its constants are tuned on other slides."""
    tuning = generated_slides(BLOB_SLIDES, SIDE, FIRST, first_seed=BLOB_SEED)
    best, finder = 0.0, None
    for (plane, limits), sigmas in product(LIMITS.items(), SIGMAS):
        for limit in limits:
            candidate = _blobs(plane, limit, sigmas)
            threshold, found = matches_of(tuning, candidate).best_threshold()
            if finder is None or found > best:
                best, finder = found, (candidate, threshold)
    assert finder is not None
    return [matches_of(held_out(FIRST), finder[0]).f1(finder[1])]


@cache
def _trained_f1() -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for seed in SEEDS:
        with trained("mitosis", "--seed", str(seed), limit_cpu_s=TRAIN_CPU_S) as run:
            pairs.append((bundle_f1(run.bundle, FIRST), bundle_f1(run.bundle, SECOND)))
    return pairs


@cache
def held_out(style: Style) -> list[AnnotatedSlide]:
    """Return the held-out slides of a style."""
    return generated_slides(SLIDES, SIDE, style, first_seed=FIRST_SEED if style is FIRST else SECOND_SEED)


def bundle_f1(bundle: Path, style: Style) -> float:
    """Return F1 of a bundle on whole slides of a style, at the application's threshold."""
    from penstock.cli.tile_sources import dense_run

    cache_folder = bundle.parent / "cache"
    with dense_run(
        str(bundle), app=None, device="auto", precision="fp32", threads=None, cores=2, cache=cache_folder
    ) as run:
        return matches_of(held_out(style), lambda one: run.over(one.slide).finds).f1()


def matches_of(slides: Sequence[AnnotatedSlide], find: Callable[[AnnotatedSlide], list[Find]]) -> Matches:
    """Match the finds on each slide with its figures."""
    return Matches.joined([match(find(one), one.figures) for one in slides])


def _blobs(plane: str, limit: float, sigmas: tuple[float, float]) -> Callable[[AnnotatedSlide], list[Find]]:
    """Differences of Gaussians over the darkness beyond a threshold; the score of a blob is its depth."""

    def find(one: AnnotatedSlide) -> list[Find]:
        import skimage.feature

        # Its annotations say int where it takes any number.
        blob_dog: Any = skimage.feature.blob_dog
        depth_HW = _depth(one.slide.read(0, 0, one.slide.width, one.slide.height), plane, limit)
        found = blob_dog(depth_HW, min_sigma=sigmas[0], max_sigma=sigmas[1], threshold=0.01, exclude_border=False)
        return [
            Find(label="blob", score=float(depth_HW[int(y), int(x)]), x=(x + 0.5) * REDUCTION, y=(y + 0.5) * REDUCTION)
            for y, x, _ in found.tolist()
        ]

    return find


def _depth(pixels_HW3: Array, plane: str, limit: float) -> Array:
    from skimage.color import rgb2hed
    from skimage.transform import downscale_local_mean

    reduced_HW3 = downscale_local_mean(pixels_HW3.astype(np.float32), (REDUCTION, REDUCTION, 1))
    if plane == "stain":
        depth_HW = rgb2hed(reduced_HW3 / 255)[..., 0] - limit
        return np.clip(depth_HW / 0.2, 0, 1)
    channel = ("red", "green", "blue").index(plane)
    return np.clip((limit - reduced_HW3[..., channel]) / limit, 0, 1)
