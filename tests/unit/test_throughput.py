"""How fast a training is, by clocks that are made up, and what share of a device's peak that is."""

import numpy as np
import pytest
import torch
from torch import nn

from penstock.models.flops import flops, peak_flops
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.report.throughput import Pace, Rate, mfu_of_one


def test_validations_and_checkpoints_are_left_out() -> None:
    pace = Pace(mfu_of_one=0.001)
    pace.begin(100.0)
    assert pace.whole is None
    pace.taken(300)
    assert pace.rate(103.0) == Rate(samples_per_s=100.0, mfu=0.1)
    # A checkpoint of 5 s between steps of 3 s and 1 s.
    pace.leave_out(5.0)
    pace.taken(200)
    assert pace.reset(109.0).samples_per_s == 125.0
    # A validation of 11 s.
    pace.leave_out(11.0)
    pace.taken(100)
    assert pace.reset(122.0).samples_per_s == 50.0
    assert pace.whole == Rate(samples_per_s=100.0, mfu=0.1)


def test_a_rate_says_what_is_known() -> None:
    assert Rate(samples_per_s=1234.56, mfu=None).describe() == "1,235 samples/s"
    assert Rate(samples_per_s=1234.56, mfu=0.4567).describe() == "1,235 samples/s  MFU 45.7%"
    assert Rate(samples_per_s=1234.56, mfu=None).fields() == {"samples_per_s": 1234.6}
    assert Rate(samples_per_s=1.0, mfu=0.45678).fields() == {"samples_per_s": 1.0, "mfu": 0.4568}


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "tf32", 378e12),
        ("NVIDIA H200 NVL", "fp32", 60e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("Tesla T4", "fp16", None),
    ],
)
def test_a_peak_is_that_of_the_device_and_the_precision(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() > 0 else self.layer(-x)


def test_an_mfu_is_of_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = np.ones((2, 4), np.float32)
    examples = ArraySet(inputs=inputs, targets=inputs)
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        steps=1,
        precision="bf16",
    )
    network = nn.Linear(4, 2)
    assert mfu_of_one(network, inputs, recipe, World()) == (None, None)
    world = World(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    of_one, why = mfu_of_one(network, inputs, recipe, world)
    # Forward, and the gradients of the weights: there are none of the inputs.
    assert flops(network, torch.from_numpy(inputs), backward=True) == 2 * (2 * 2 * 4 * 2)
    assert (of_one, why) == (2 * 2 * 4 * 2 / 989.4e12, None)
    of_one, why = mfu_of_one(Branching(), inputs, recipe, world)
    assert of_one is None
    assert why is not None
    assert why.startswith("No MFU: the network's arithmetic cannot be counted (")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    of_one, why = mfu_of_one(network, inputs, recipe, world)
    assert (of_one, why) == (None, "No MFU: the peak of 'Tesla T4' in bf16 is not known.")
