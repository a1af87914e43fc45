"""A real small problem learned by one process, by two that share the batch, and by two that share the wide layers too.

python -m penstock.bench.convergence RANK SIZE PORT LAYOUT SEED FOLDER   one process; the first one prints the outcome
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.bench.together import said_by_first
from penstock.core.application import find_application
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
    return [_loss(layout, seed) for seed in seeds]


def _loss(layout: str, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="penstock-converges-") as folder:
        arguments = [layout, str(seed), folder]
        said = said_by_first("penstock.bench.convergence", LAYOUTS[layout][0], arguments, LIMIT_S)
    return float(json.loads(said[-1])["test_loss"])


def main(rank: int, size: int, port: int, layout: str, seed: int, folder: Path) -> None:
    """Train in one process of a layout."""
    torch.set_num_threads(1)
    found = find_application("digits")
    recipe = replace(found.recipe(), seed=seed, placements=LAYOUTS[layout][1])
    seat = Seat(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with joined(seat, torch.device("cpu"), LIMIT_S) as world:
        result = train(found, folder, recipe, overrides={}, quiet=True, world=world)
        if world.is_first:
            sys.stdout.write(json.dumps(result.metrics) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), layout=sys.argv[4], seed=int(sys.argv[5]), folder=Path(sys.argv[6]))
