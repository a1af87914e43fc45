"""Test loss of the digits, trained by one process or two, with tensor-parallel layers, and in lower precision on a GPU.

python -m benchmarks.acceptance.train.convergence RANK SIZE PORT LAYOUT PRECISION DEVICE SEED FOLDER

is one rank; rank 0 prints the metrics.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.acceptance.train.rank_processes import own_world, rank0_lines
from penstock.core.application import find_application
from penstock.core.errors import BenchError
from penstock.train.placement import Placement, Placements
from penstock.train.recipe import Parallel
from penstock.train.run import train

SEEDS = (0, 1, 2, 3)
LIMIT_S = 600.0
# The embedding and the last layer of the digits' network are tensor parallel, its convolutions data-parallel.
HYBRID: Placements = {"features.16": Placement(kind="column-parallel"), "head": Placement(kind="row-parallel")}
LAYOUTS: dict[str, tuple[int, Placements]] = {"one process": (1, {}), "data-parallel": (2, {}), "hybrid": (2, HYBRID)}


def losses(layout: str, seeds: Sequence[int] = SEEDS) -> list[float]:
    """Return the test loss of the digits in one layout, for several seeds.

    Args:
        layout: A key of `LAYOUTS`.
        seeds: The seeds.

    Raises:
        BenchError: A process failed.
    """
    return [_trained(layout, "fp32", "cpu", seed)["test_loss"] for seed in seeds]


def on_gpu(precision: str, metric: Literal["test_loss", "test_accuracy"]) -> list[float]:
    """Return a metric of the digits on one GPU in one precision, for every seed.

    Args:
        precision: The recipe's precision.
        metric: The metric.

    Raises:
        BenchError: There is no GPU, or a process failed.
    """
    if not torch.cuda.is_available():
        raise BenchError(f"{precision} is measured on a GPU, and torch sees none; run it where there is one.")
    return [found[metric] for found in side_by_side(precision, "cuda")]


@cache
def side_by_side(precision: str, device: Literal["cpu", "cuda"], seeds: tuple[int, ...] = SEEDS) -> list[Any]:
    """Return all metrics of each seed; the trainings share one device at the same time.

    Raises:
        BenchError: A process failed.
    """
    with ThreadPoolExecutor(len(seeds)) as threads:
        return list(threads.map(lambda seed: _trained("one process", precision, device, seed), seeds))


def _trained(layout: str, precision: str, device: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="penstock-converges-") as folder:
        arguments = [layout, precision, device, str(seed), folder]
        lines = rank0_lines("benchmarks.acceptance.train.convergence", LAYOUTS[layout][0], arguments, LIMIT_S)
    return json.loads(lines[-1])


def main(layout: str, precision: str, device: str, seed: str, folder: str) -> None:
    """Train as one rank of a layout."""
    # cuBLAS is deterministic only with its own workspace, which it reads before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    found = find_application("digits")
    parallel = Parallel(placements=LAYOUTS[layout][1])
    recipe = replace(found.recipe(), seed=int(seed), parallel=parallel, precision=precision)
    with own_world(LIMIT_S, device) as world:
        result = train(found, Path(folder), recipe, overrides={}, quiet=True, world=world)
        if world.is_rank_zero:
            sys.stdout.write(json.dumps(result.metrics) + "\n")


if __name__ == "__main__":
    main(*sys.argv[4:])
