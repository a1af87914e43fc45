"""A real small problem learned in several ways: by one process or two, with layers cut, in fewer bits on a GPU.

python -m penstock.bench.convergence RANK SIZE PORT LAYOUT PRECISION DEVICE SEED FOLDER

is one process; the first one prints the outcome.
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

from penstock.bench.together import said_by_first
from penstock.core.application import find_application
from penstock.core.errors import BenchError
from penstock.train.loop import train
from penstock.train.placements import Placement, Placements
from penstock.train.world import Seat, joined

SEEDS = (0, 1, 2, 3)
LIMIT_S = 600.0
# The digits' network: its embedding and its last layer cut, its convolutions not.
HYBRID: Placements = {"features.16": Placement(kind="columns"), "head": Placement(kind="rows")}
LAYOUTS: dict[str, tuple[int, Placements]] = {"one process": (1, {}), "data-parallel": (2, {}), "hybrid": (2, HYBRID)}


def losses(layout: str, seeds: Sequence[int] = SEEDS) -> list[float]:
    """The test loss of the digits, trained in one way from several seeds.

    Args:
        layout: Of `LAYOUTS`.
        seeds: Which.

    Raises:
        BenchError: A process failed.
    """
    return [_trained(layout, "fp32", "cpu", seed)["test_loss"] for seed in seeds]


def on_gpu(precision: str, metric: Literal["test_loss", "test_accuracy"]) -> list[float]:
    """A metric of the digits, trained by one process on a GPU in some precision, from every seed.

    Args:
        precision: As a recipe has it.
        metric: Which.

    Raises:
        BenchError: There is no GPU, or a process failed.
    """
    if not torch.cuda.is_available():
        raise BenchError(f"{precision} is measured on a GPU, and torch sees none; run it where there is one.")
    return [found[metric] for found in side_by_side(precision, "cuda")]


@cache
def side_by_side(precision: str, device: Literal["cpu", "cuda"], seeds: tuple[int, ...] = SEEDS) -> list[Any]:
    """All metrics of each seed. The trainings share one device, at the same time.

    Raises:
        BenchError: A process failed.
    """
    with ThreadPoolExecutor(len(seeds)) as threads:
        return list(threads.map(lambda seed: _trained("one process", precision, device, seed), seeds))


def _trained(layout: str, precision: str, device: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="penstock-converges-") as folder:
        arguments = [layout, precision, device, str(seed), folder]
        said = said_by_first("penstock.bench.convergence", LAYOUTS[layout][0], arguments, LIMIT_S)
    return json.loads(said[-1])


def main(rank: int, size: int, port: int, layout: str, precision: str, device: str, seed: int, folder: Path) -> None:
    """Train in one process of a layout."""
    # cuBLAS is deterministic only with a workspace of its own, which it looks for before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    found = find_application("digits")
    recipe = replace(found.recipe(), seed=seed, placements=LAYOUTS[layout][1], precision=precision)
    seat = Seat(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with joined(seat, torch.device(device, rank) if device == "cuda" else torch.device("cpu"), LIMIT_S) as world:
        result = train(found, folder, recipe, overrides={}, quiet=True, world=world)
        if world.is_first:
            sys.stdout.write(json.dumps(result.metrics) + "\n")


if __name__ == "__main__":
    own_layout, own_precision, kind = sys.argv[4:7]
    main(
        *map(int, sys.argv[1:4]),
        layout=own_layout,
        precision=own_precision,
        device=kind,
        seed=int(sys.argv[7]),
        folder=Path(sys.argv[8]),
    )
