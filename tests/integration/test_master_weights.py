"""bf16 copies of weights where layers are laid over processes: what is learned is what is learned without them."""

import json
import sys

import numpy as np
import torch

from benchmarks.acceptance.train.parity import SmallConvNet
from benchmarks.acceptance.train.rank_processes import rank0_lines
from penstock.train.checkpoint.state import full_state
from penstock.train.numerics import numerics
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, join_world
from penstock.train.placement import Placement
from penstock.train.recipe import StepExecution
from penstock.train.trainer import Trainer
from tests.support.parallel_pictures import TENSOR_PARALLEL, pictures_recipe

STEPS, BATCH = 4, 9
LAYOUTS = {
    "data": {},
    "tensor-parallel": TENSOR_PARALLEL,
    "fully-sharded": {"classifier": Placement(kind="fully-sharded")},
}


def test_copies_change_nothing_that_is_learned() -> None:
    said = rank0_lines("tests.integration.test_master_weights", 2, [], 200)
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert [each["layout"] for each in found] == list(LAYOUTS)
    for each in found:
        assert each["copies"], each
        assert each["first"], each
        assert each["apart"] < 1e-3, each


def run(layout: str, *, working: bool, world: World) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The losses, the weights after some steps, and what was said of copies."""
    recipe = pictures_recipe(
        LAYOUTS[layout], rate=0.02, batch_size=BATCH, steps=STEPS, execution=StepExecution(master_weights=working)
    )
    rng = np.random.default_rng(0)
    with numerics(recipe):
        torch.manual_seed(0)
        inputs = rng.normal(size=(STEPS, BATCH, 3, 8, 8)).astype(np.float32)
        trainer = Trainer(SmallConvNet(0.3), recipe, STEPS, world, inputs=inputs[0, :2])
        own, labels = trainer.rows, rng.integers(0, 12, (STEPS, BATCH))
        losses = [
            trainer.step((torch.from_numpy(inputs[step, own]), torch.from_numpy(labels[step, own])), step)
            for step in range(STEPS)
        ]
        state = full_state(trainer.parallel_model, trainer.world, trainer.module.state_dict())
        whole = [tensor.double().flatten() for tensor in state.values()] or [torch.zeros(1)]
        return torch.stack(losses).double(), torch.cat(whole), " ".join(trainer.layout.notices)


def main(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    seat = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with join_world(seat, torch.device("cpu"), 60.0) as world:
        for layout in LAYOUTS:
            losses, ours, said = run(layout, working=True, world=world)
            expected, theirs, _ = run(layout, working=False, world=world)
            apart = ((ours - theirs).norm() / theirs.norm()).item()
            # Of the first step, before any rounding of what was stepped.
            first = torch.equal(losses[0], expected[0])
            print(json.dumps({"layout": layout, "copies": "copies of" in said, "first": first, "apart": apart}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
