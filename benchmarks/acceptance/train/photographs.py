"""Photographs as people have them: crops of scikit-image's pictures as JPEG files."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, QUALITY = 500, 375, 90
NAMES = ("astronaut", "chelsea", "coffee", "rocket")


def photographs(count: int) -> Iterator[tuple[int, bytes]]:
    """Yield the class and the JPEG file of `count` crops of 500 x 375 pixels, always the same ones."""
    from skimage import data

    rng = np.random.default_rng(0)
    originals = [Image.fromarray(getattr(data, name)()) for name in NAMES]
    for number in range(count):
        original = originals[number % len(NAMES)]
        share = rng.uniform(0.6, 1.0)
        wide, high = share * original.width, share * original.height
        left, top = rng.uniform(0, original.width - wide), rng.uniform(0, original.height - high)
        crop = original.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, (left, top, left + wide, top + high))
        sink = io.BytesIO()
        crop.save(sink, "JPEG", quality=QUALITY)
        yield number % len(NAMES), sink.getvalue()


def write_folder(folder: Path, count: int) -> None:
    """Write photographs into a folder for each class."""
    for name in NAMES:
        (folder / name).mkdir(parents=True)
    for number, (label, content) in enumerate(photographs(count)):
        (folder / NAMES[label] / f"{number:05d}.jpg").write_bytes(content)
