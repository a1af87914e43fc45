"""Several GPUs against one in float64, and their captured steps against launched ones, bit for bit."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.optim import SGD

from penstock.bench.parity import CASES, Pictures, agreements
from penstock.train.launch import free_port
from penstock.train.losses import CrossEntropy
from penstock.train.numerics import numerics
from penstock.train.placements import Placement
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.state import whole_state
from penstock.train.trainer import Trainer
from penstock.train.world import Seat, World, joined

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]

STEPS, BATCH = 9, 32
LAYOUTS = {
    "data": {},
    "columns and rows": {
        "classifier.1": Placement(kind="columns"),
        "classifier.4": Placement(kind="rows"),
        "head": Placement(kind="classes"),
    },
    "sharded": {"features": Placement(kind="sharded"), "classifier": Placement(kind="sharded")},
    "recomputed": {"classifier": Placement(kind="sharded", recompute=True)},
}


@pytest.mark.parametrize("processes", [2, 4])
def test_gradients_are_those_of_one_process_in_float64(processes: int) -> None:
    if processes > GPUS:
        pytest.skip(f"there are {GPUS} GPUs")
    found = agreements(processes, CASES, "cuda")
    assert [each.case for each in found] == list(CASES)
    assert max((each.worst, each.case) for each in found) < (1e-5, "")


def test_captured_steps_are_the_launched_ones() -> None:
    port = str(free_port())
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), port], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    found = [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(LAYOUTS)
    for each in found:
        assert each["same"], each
        assert each["captured"], each


def run(layout: str, *, graph: bool, world: World) -> tuple[bool, torch.Tensor, list[str]]:
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(0.1),
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=BATCH,
        steps=STEPS,
        placements=LAYOUTS[layout],
        gradient_precision="bf16",
        precision="bf16",
        working_weights=True,
        graph=graph,
    )
    rng = np.random.default_rng(0)
    said: list[str] = []
    with numerics(recipe):
        torch.manual_seed(0)
        trainer = Trainer(Pictures(0.3), recipe, STEPS, world, inputs=rng.normal(size=(2, 3, 8, 8)).astype(np.float32))
        trainer.say = said.append
        losses = []
        for step in range(STEPS):
            inputs = rng.normal(size=(BATCH, 3, 8, 8)).astype(np.float32)
            labels = rng.integers(0, 12, BATCH)
            own = trainer.rows
            losses.append(trainer.step((torch.from_numpy(inputs[own]), torch.from_numpy(labels[own])), step))
        state = whole_state(trainer.placed, trainer.world, trainer.module.state_dict())
        flat = [tensor.double().flatten() for tensor in state.values()]
        return trainer.steps.is_captured, torch.cat([torch.stack(losses).double().cpu(), *flat]), said


def main(rank: int, port: int) -> None:
    seat = Seat(rank=rank, size=2, local_rank=rank, local_size=2, address="127.0.0.1", port=port)
    with joined(seat, torch.device("cuda", rank), 60.0) as world:
        for layout in LAYOUTS:
            captured, found, said = run(layout, graph=True, world=world)
            _, expected, _ = run(layout, graph=False, world=world)
            same = torch.equal(found, expected) and bool(found.isfinite().all())
            print(json.dumps({"layout": layout, "captured": captured, "same": same, "said": said}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
