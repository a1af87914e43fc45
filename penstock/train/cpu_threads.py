"""Choice of the CPU threads of a step: measured, because small networks are faster with one."""

import time
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from penstock.core.spec import Array
from penstock.core.wording.counted import counted
from penstock.train.data.examples import Examples
from penstock.train.data.loader import first_batch
from penstock.train.parallel.world import World
from penstock.train.recipe import Recipe
from penstock.train.report.run_comparison import read_run
from penstock.train.report.run_log import RUN_FILE
from penstock.train.trainer import Trainer

# A shorter training gains less than the measurement takes, and one below `LONG_STEPS` is measured in one round: that
# tells what threads cost where other processes have the cores, which is tens of times a step.
MIN_STEPS, LONG_STEPS = 20, 200
# Larger networks use all threads: their steps take longer than what threads cost, and their copy much memory.
MAX_PARAMETERS, MAX_STEP_S = 20_000_000, 0.1
# Operations of a shorter step are too small for threads. The choice is then the same in each run.
SMALL_STEP_S = 0.001
# More threads must be faster by this factor, so that noise does not choose them.
GAIN = 1.3
ROUNDS, STEPS_A_ROUND = 3, 4
# Not measured again, because the steps are slower by this factor.
HOPELESS = 3.0
MAX_ROUND_S = 0.05


def choose_threads(
    network: nn.Module, recipe: Recipe, train: Examples, world: World, inputs: Array
) -> tuple[int, str] | None:
    """Choose the number of torch's CPU threads by the time of a few steps of a copy of the network.

    Args:
        network: The network, whole. It is not changed.
        recipe: The training recipe.
        train: The training set; its first examples are read.
        world: The processes.
        inputs: Some raw inputs, as of `Trainer`.

    Returns:
        The number, and a sentence that has the times; None to leave it as it is: if the recipe has one, on a GPU, with
        several processes, for a short training or for a large network.
    """
    most, total = torch.get_num_threads(), recipe.total_steps(len(train))
    if recipe.execution.threads is not None or world.size > 1 or world.device.type != "cpu" or most == 1:
        return None
    if total < MIN_STEPS or sum(weight.numel() for weight in network.parameters()) > MAX_PARAMETERS:
        return None
    if len(train) < recipe.batch_size:
        return None
    batch = first_batch(train, recipe.batch_size, on_bad=recipe.loading.bad_examples)
    trainer = Trainer(deepcopy(network), recipe, total, world, inputs=inputs, record=train.record)
    rounds = ROUNDS if total >= LONG_STEPS else 1
    tried = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        began_s = time.perf_counter()
        taken, spent_s = 0, 0.0
        while taken < STEPS_A_ROUND and spent_s < MAX_ROUND_S:
            trainer.step(batch, 0)
            taken, spent_s = taken + 1, time.perf_counter() - began_s
        return spent_s / taken

    try:
        # The first steps allocate the optimizer's state. With one thread, because a small step with many may be the
        # slow one.
        alone_s = min(seconds(1) for _ in range(rounds))
        if alone_s > MAX_STEP_S:
            return None
        if alone_s < SMALL_STEP_S:
            return 1, f"1 of {most} CPU threads: a step takes {_shown(alone_s)} ms."
        times: dict[int, float] = {}
        for threads in tried:
            first = seconds(threads)
            again = rounds - 1 if first < HOPELESS * min(times.values(), default=first) else 0
            times[threads] = min([first, *(seconds(threads) for _ in range(again))])
    finally:
        torch.set_num_threads(most)
        trainer.close()
    chosen = fewest_threads(times)
    own, whole = _shown(times[chosen]), _shown(times[most])
    return chosen, f"{chosen} of {most} CPU threads: a step takes {own} ms, with {counted(most, 'thread')} {whole} ms."


def recorded_threads(folder: Path, world: World) -> int | None:
    """Return the number of threads of the run in a folder; None if it had another number of processes or is not there.

    Args:
        folder: RUN.
        world: The processes.
    """
    if not (folder / RUN_FILE).exists():
        return None
    fields = read_run(folder).fields
    return fields.get("threads") if fields.get("processes", 1) == world.size else None


def fewest_threads(seconds: dict[int, float]) -> int:
    """Return the fewest threads than which no more are faster by `GAIN`.

    Args:
        seconds: Time of a step by the number of threads.
    """
    chosen, *others = sorted(seconds)
    for threads in others:
        if seconds[threads] * GAIN < seconds[chosen]:
            chosen = threads
    return chosen


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
