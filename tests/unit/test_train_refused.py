"""What a device refuses is said with what to change."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core.errors import TrainError
from penstock.train.device_errors import explained
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution

X, Y = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
# More bytes than any machine can address.
TOO_MUCH = 1 << 58


def recipe() -> Recipe:
    part = ArraySet(inputs=X, targets=Y)
    return Recipe(
        data=lambda: Data(train=part, validation=part),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4096,
        steps=1,
        precision="tf32",
        execution=StepExecution(accumulation_steps=2),
    )


class Greedy(nn.Linear):
    """Wants its memory when it is trained, and not when it is looked at."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + torch.empty(TOO_MUCH)[0] if self.training else input)


class Scattered(nn.Linear):
    """Does what torch has no deterministic algorithm for."""

    def forward(self, input: Tensor) -> Tensor:
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
        return super().forward(input)


def test_a_step_that_does_not_fit_says_what_to_change() -> None:
    with pytest.raises(TrainError) as caught:
        penstock.fit(Greedy(2, 2), (X, Y), batch_size=3, steps=2, device="cpu", quiet=True)
    said = str(caught.value)
    assert said.startswith("a step needs more memory than the CPU has (it requested 1152921504606846976 bytes more);")
    assert (
        "(batch_size=3), compute it in more micro-batches (accumulation_steps=1), or in fewer bits (precision='fp32')"
        in said
    )


def test_a_gpu_that_is_full_is_told_with_the_process() -> None:
    with (
        pytest.raises(
            TrainError,
            match=r"rank 1 of 2 needs more memory than the CPU has \(it requested 256.00 GiB more\); "
            r"lower the batch size \(batch_size=4,096\), compute it in more micro-batches \(accumulation_steps=2\)",
        ),
        explained(recipe(), World(1, 2, group=object())),  # pyright: ignore[reportArgumentType]
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which ..."
        )


def test_what_has_no_deterministic_algorithm_is_named() -> None:
    with pytest.raises(TrainError, match=r"put_ has no deterministic algorithm on the CPU; give --no-deterministic"):
        penstock.fit(Scattered(2, 2), (X, Y), steps=2, device="cpu", quiet=True)
    done = penstock.fit(Scattered(2, 2), (X, Y), steps=2, device="cpu", quiet=True, deterministic=False)
    assert np.isfinite(done.metrics["train_loss"])


def test_what_else_fails_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"), explained(recipe(), World()):
        raise RuntimeError("CUDA error: unspecified launch failure")
