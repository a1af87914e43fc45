"""Several GPUs against one in float64, and their captured steps against launched ones, bit for bit."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.acceptance.train.parity import CASES, SmallConvNet, parity_errors
from benchmarks.acceptance.train.rank_processes import rank0_lines
from penstock.train.checkpoint.state import full_state
from penstock.train.numerics import numerics
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, join_world
from penstock.train.placement import Placement
from penstock.train.recipe import StepExecution
from penstock.train.trainer import Trainer
from tests.support.parallel_pictures import TENSOR_PARALLEL, pictures_recipe

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]

STEPS, BATCH = 9, 32
LAYOUTS = {
    "data": {},
    "tensor-parallel": TENSOR_PARALLEL,
    "fully-sharded": {"features": Placement(kind="fully-sharded"), "classifier": Placement(kind="fully-sharded")},
    "checkpointed": {"classifier": Placement(kind="fully-sharded", activation_checkpointing=True)},
}


@pytest.mark.parametrize("processes", [2, 4])
def test_gradients_are_those_of_one_process_in_float64(processes: int) -> None:
    if processes > GPUS:
        pytest.skip(f"there are {GPUS} GPUs")
    found = parity_errors(processes, CASES, "cuda")
    assert [each.case for each in found] == list(CASES)
    assert max((each.worst, each.case) for each in found) < (1e-5, "")


def test_captured_steps_are_the_launched_ones() -> None:
    said = rank0_lines("tests.gpu.test_train_several", 2, [], 200.0)
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert [each["layout"] for each in found] == list(LAYOUTS)
    for each in found:
        assert each["same"], each
        assert each["captured"], each


def run(layout: str, *, graph: bool, world: World) -> tuple[bool, torch.Tensor, list[str]]:
    recipe = pictures_recipe(
        LAYOUTS[layout],
        rate=0.05,
        batch_size=BATCH,
        steps=STEPS,
        execution=StepExecution(master_weights=True, graph=graph),
    )
    rng = np.random.default_rng(0)
    said: list[str] = []
    with numerics(recipe):
        torch.manual_seed(0)
        trainer = Trainer(
            SmallConvNet(0.3), recipe, STEPS, world, inputs=rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
        )
        trainer.notify = said.append
        losses = []
        for step in range(STEPS):
            inputs = rng.normal(size=(BATCH, 3, 8, 8)).astype(np.float32)
            labels = rng.integers(0, 12, BATCH)
            own = trainer.rows
            losses.append(trainer.step((torch.from_numpy(inputs[own]), torch.from_numpy(labels[own])), step))
        state = full_state(trainer.parallel_model, trainer.world, trainer.module.state_dict())
        flat = [tensor.double().flatten() for tensor in state.values()]
        return trainer.steps.is_captured, torch.cat([torch.stack(losses).double().cpu(), *flat]), said


def main(rank: int, size: int, port: int) -> None:
    seat = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with join_world(seat, torch.device("cuda", rank), 60.0) as world:
        for layout in LAYOUTS:
            captured, found, said = run(layout, graph=True, world=world)
            _, expected, _ = run(layout, graph=False, world=world)
            same = torch.equal(found, expected) and bool(found.isfinite().all())
            print(json.dumps({"layout": layout, "captured": captured, "same": same, "said": said}), flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
