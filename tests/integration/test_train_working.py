"""bf16 copies of weights where layers are laid over processes: what is learned is what is learned without them."""

import json
import sys

import numpy as np
import torch

from penstock.bench.parity import Pictures
from penstock.bench.together import said_by_first
from penstock.train.numerics import numerics
from penstock.train.placements import Placement
from penstock.train.state import whole_state
from penstock.train.trainer import Trainer
from penstock.train.world import Seat, World, joined
from tests.support.laid_out import COLUMNS_AND_ROWS, pictures_recipe

STEPS, BATCH = 4, 9
LAYOUTS = {
    "data": {},
    "columns and rows": COLUMNS_AND_ROWS,
    "sharded": {"classifier": Placement(kind="sharded")},
}


def test_copies_change_nothing_that_is_learned() -> None:
    said = said_by_first("tests.integration.test_train_working", 2, [], 200)
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert [each["layout"] for each in found] == list(LAYOUTS)
    for each in found:
        assert each["copies"], each
        assert each["first"], each
        assert each["apart"] < 1e-3, each


def run(layout: str, *, working: bool, world: World) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The losses, the weights after some steps, and what was said of copies."""
    recipe = pictures_recipe(LAYOUTS[layout], rate=0.02, batch_size=BATCH, steps=STEPS, working_weights=working)
    rng = np.random.default_rng(0)
    with numerics(recipe):
        torch.manual_seed(0)
        inputs = rng.normal(size=(STEPS, BATCH, 3, 8, 8)).astype(np.float32)
        trainer = Trainer(Pictures(0.3), recipe, STEPS, world, inputs=inputs[0, :2])
        own, labels = trainer.rows, rng.integers(0, 12, (STEPS, BATCH))
        losses = [
            trainer.step((torch.from_numpy(inputs[step, own]), torch.from_numpy(labels[step, own])), step)
            for step in range(STEPS)
        ]
        state = whole_state(trainer.placed, trainer.world, trainer.module.state_dict())
        whole = [tensor.double().flatten() for tensor in state.values()] or [torch.zeros(1)]
        return torch.stack(losses).double(), torch.cat(whole), " ".join(trainer.layout.sentences)


def main(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    seat = Seat(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with joined(seat, torch.device("cpu"), 60.0) as world:
        for layout in LAYOUTS:
            losses, ours, said = run(layout, working=True, world=world)
            expected, theirs, _ = run(layout, working=False, world=world)
            apart = ((ours - theirs).norm() / theirs.norm()).item()
            # Of the first step, before any rounding of what was stepped.
            first = torch.equal(losses[0], expected[0])
            print(json.dumps({"layout": layout, "copies": "copies of" in said, "first": first, "apart": apart}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
