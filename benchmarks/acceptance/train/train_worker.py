"""One rank of the training benchmark: takes the steps of each case and times them.

    python -m benchmarks.acceptance.train.train_worker RANK SIZE PORT DEVICE CASES SECONDS REPEAT

CASES is a JSON list of cases. Rank 0 writes a JSON line for each to its standard output.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.acceptance.train.rank_processes import own_world
from benchmarks.acceptance.train.train_case import MODELS, TrainingCase
from benchmarks.acceptance.train.train_methods import make_step, numeric_settings
from penstock.train.parallel.world import World, split_rows

LIMIT_S = 180.0
BATCHES = 3
# Enough steps to choose, compile and capture everything.
WARM_UP = 16


def measure(case: TrainingCase, world: World, seconds: float, repeat: int) -> dict[str, Any]:
    """Return the fields of a `CaseResult`, but for its case.

    Args:
        case: Network and method.
        world: The ranks.
        seconds: Approximate duration of each repetition.
        repeat: Number of repetitions.
    """
    began = time.monotonic()
    batches = list(_batches(case, world))
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with numeric_settings(case):
        step = make_step(case, world, batches[0][0][:2].cpu().numpy())
        given = cycle(batches)
        losses = [step(*next(given)).clone() for _ in range(WARM_UP)]
        world.sum_on_host(losses[-1])
        ready_s = time.monotonic() - began
        count = _count(step, given, world, seconds)
        rates = [count * case.batch / _timed(step, given, world, count) for _ in range(repeat)]
        (last,) = world.sum_on_host(step(*next(given)))
    (first,) = world.sum_on_host(losses[0])
    found = {
        "processes": world.size,
        "rates": rates,
        "losses": [first / world.size, last / world.size],
        "ready_s": ready_s,
    }
    if world.device.type == "cuda":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if not math.isfinite(last):
        raise ArithmeticError(f"the loss of {case.label} is {last}")
    return found


def _batches(case: TrainingCase, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    model, rows = MODELS[case.model], split_rows(case.batch, world.size)
    rng = np.random.default_rng(1000 + world.rank)
    for _ in range(BATCHES):
        inputs = rng.integers(0, 256, (rows[world.rank], *model.input_shape), dtype=np.uint8)
        labels = rng.integers(0, model.classes, rows[world.rank])
        yield torch.from_numpy(inputs).to(world.device), torch.from_numpy(labels).to(world.device)


def _count(step: Any, given: Iterator[Any], world: World, seconds: float) -> int:
    """The number of steps for a repetition, the same on every rank."""
    took_s = _timed(step, given, world, WARM_UP) / WARM_UP
    (longest,) = world.broadcast_on_host([took_s])
    return max(4, round(seconds / longest))


def _timed(step: Any, given: Iterator[Any], world: World, count: int) -> float:
    """Seconds of some steps, between two barriers."""
    world.sum_on_host(0.0)
    _wait(world)
    start = time.perf_counter()
    for _ in range(count):
        step(*next(given))
    _wait(world)
    world.sum_on_host(0.0)
    (took,) = world.broadcast_on_host([time.perf_counter() - start])
    return took


def _release(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def main(device: str, cases: str, seconds: str, repeat: str) -> None:
    """Measure all cases as one rank."""
    torch.set_num_threads(1 if device == "cpu" else 4)
    with own_world(LIMIT_S, device) as world:
        for case in (TrainingCase(**fields) for fields in json.loads(cases)):
            result = measure(case, world, float(seconds), int(repeat))
            if world.is_rank_zero:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
            _release(world.device)


if __name__ == "__main__":
    main(*sys.argv[4:])
