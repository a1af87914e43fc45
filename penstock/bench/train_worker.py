"""One process of a measurement of training: takes the steps of one case after the other and says how long they took.

    python -m penstock.bench.train_worker RANK SIZE PORT DEVICE CASES SECONDS REPEAT

CASES is a JSON list of cases. The first process writes a JSON line for each to its standard output as it is measured.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.bench.train_case import MODELS, Case
from penstock.bench.train_ways import make_step, settings
from penstock.train.world import Seat, World, joined, split_rows

LIMIT_S = 180.0
BATCHES = 3
# Until everything is chosen, compiled and captured.
WARM_UP = 16
LONGEST_WARM_UP_S = 3.0


def measure(case: Case, world: World, seconds: float, repeat: int) -> dict[str, Any]:
    """Examples a second over all processes, and how they were learned from.

    Args:
        case: What, and which way.
        world: The processes.
        seconds: How long each repetition takes, about.
        repeat: How many there are.
    """
    began = time.monotonic()
    batches = list(_batches(case, world))
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with settings(case, world):
        step = make_step(case, world, batches[0][0][:2].cpu().numpy())
        given = cycle(batches)
        losses = [step(*next(given)).clone() for _ in range(WARM_UP)]
        world.total(losses[-1])
        ready_s = time.monotonic() - began
        count = _count(step, given, world, seconds)
        rates = [count * case.batch / _timed(step, given, world, count) for _ in range(repeat)]
        (last,) = world.total(step(*next(given)))
    (first,) = world.total(losses[0])
    found = {
        "case": asdict(case),
        "processes": world.size,
        "rates": rates,
        "losses": [first / world.size, last / world.size],
        "ready_s": ready_s,
        "steps": count,
    }
    if world.device.type == "cuda":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if not math.isfinite(last):
        raise ArithmeticError(f"the loss of {case.label} is {last}")
    return found


def _batches(case: Case, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    model, rows = MODELS[case.model], split_rows(case.batch, world.size)
    rng = np.random.default_rng(1000 + world.rank)
    for _ in range(BATCHES):
        inputs = rng.integers(0, 256, (rows[world.rank], *model.input_shape), dtype=np.uint8)
        labels = rng.integers(0, model.classes, rows[world.rank])
        yield torch.from_numpy(inputs).to(world.device), torch.from_numpy(labels).to(world.device)


def _count(step: Any, given: Iterator[Any], world: World, seconds: float) -> int:
    """How many steps take about so long, the same in every process."""
    took_s = _timed(step, given, world, WARM_UP) / WARM_UP
    (longest,) = world.of_first([took_s])
    return max(4, round(seconds / longest))


def _timed(step: Any, given: Iterator[Any], world: World, count: int) -> float:
    """Seconds that steps take, from when all processes are ready until all are done."""
    world.total(0.0)
    _wait(world)
    start = time.perf_counter()
    for _ in range(count):
        step(*next(given))
    _wait(world)
    world.total(0.0)
    (took,) = world.of_first([time.perf_counter() - start])
    return took


def _forget(device: torch.device) -> None:
    """Nothing of a case is left for the next one."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def main(rank: int, size: int, port: int, kind: str, cases: list[Case], seconds: float, repeat: int) -> None:
    """Measure every case."""
    torch.set_num_threads(1 if kind == "cpu" else 4)
    seat = Seat(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    with joined(seat, device, LIMIT_S) as world:
        for case in cases:
            said = measure(case, world, seconds, repeat)
            if world.is_first:
                sys.stdout.write(json.dumps(said) + "\n")
                sys.stdout.flush()
            _forget(device)


if __name__ == "__main__":
    own_rank, own_size, own_port = (int(text) for text in sys.argv[1:4])
    asked = [Case(**fields) for fields in json.loads(sys.argv[5])]
    main(own_rank, own_size, own_port, sys.argv[4], asked, float(sys.argv[6]), int(sys.argv[7]))
