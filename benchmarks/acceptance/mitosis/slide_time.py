"""Time for a slide of 10,000 x 10,000 pixels full of tissue, from its file to its finds."""

import os
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.apps.mitosis.evaluate import match
from penstock.apps.mitosis.slide_file import write_slide
from penstock.apps.mitosis.style import FIRST
from penstock.apps.mitosis.tissue import make_slide
from penstock.core.errors import BenchError
from penstock.core.spec import Array
from penstock.device.dense_run import SlideFinds

# H height, W width, n figures

SIDE = 10_000
PIECE = 2_000
SEED = 5_000_000
CORES, GPU_CORES = 2, 16
REPETITIONS = 5
# A time counts only if the finds are right.
LEAST_F1 = 0.8


def slide_seconds(pack: Path) -> list[float]:
    """Return the wall times on two cores, by a pack."""
    return _times(str(pack), cores=CORES, device="cpu", precision="fp32")


def slide_gpu_seconds(bundle: Path) -> list[float]:
    """Return the wall times on one GPU with 16 cores, by a bundle in fp16."""
    return _times(str(bundle), cores=GPU_CORES, device="cuda", precision="fp16")


def _times(source: str, *, cores: int, device: str, precision: str) -> list[float]:
    from penstock.cli.tile_sources import dense_run
    from penstock.device.slides import open_slide

    with tempfile.TemporaryDirectory() as folder, _on_cores(cores) as found:
        file = Path(folder) / "slide.tif"
        figures_n2 = _write_large_slide(file, found)
        results: list[SlideFinds] = []
        times_s: list[float] = []
        with dense_run(
            source,
            app=None,
            device=device,
            precision=precision,
            threads=None,
            cores=found,
            cache=Path(folder) / "cache",
        ) as run:
            # The first is a warm-up.
            for _ in range(1 + REPETITIONS):
                started_s = time.perf_counter()
                with open_slide(file) as slide:
                    results.append(run.over(slide))
                times_s.append(time.perf_counter() - started_s)
        result = results[-1]
        reached = match(result.finds, figures_n2).f1()
        if reached < LEAST_F1:
            raise BenchError(f"F1 is {reached:.3f} on the slide; it must be {LEAST_F1} at least, so no time is given.")
        sys.stderr.write(
            f"{len(figures_n2):,} figures, F1 {reached:.3f}, {result.empty} of {result.tiles} tiles empty\n"
        )
        return times_s[1:]


@contextmanager
def _on_cores(most: int) -> Generator[int]:
    """Restrict this process to some cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:most])
    try:
        yield min(most, len(allowed))
    finally:
        os.sched_setaffinity(0, allowed)


def _write_large_slide(file: Path, threads: int) -> Array:
    """Write a slide made of many small ones; returns the centres of its figures, `[n, 2]`."""
    pixels_HW3 = np.empty((SIDE, SIDE, 3), np.uint8)
    corners = [(left, top) for top in range(0, SIDE, PIECE) for left in range(0, SIDE, PIECE)]

    def fill(index: int) -> Array:
        left, top = corners[index]
        made = make_slide(SEED + index, PIECE, PIECE, FIRST)
        pixels_HW3[top : top + PIECE, left : left + PIECE] = made.pixels
        return made.figures + np.array([left, top], np.float32)

    with ThreadPoolExecutor(threads) as pool:
        figures = list(pool.map(fill, range(len(corners))))
    write_slide(file, pixels_HW3, threads=threads)
    return np.concatenate(figures)
