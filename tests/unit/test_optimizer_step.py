"""What an optimizer is given to step by itself: fused where it can be, its state as it is left out, in parts."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core.errors import TrainError
from penstock.train.step.capturable_optimizer import CapturableOptimizer

CPU = torch.device("cpu")


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 2.0)
    return made


def test_a_first_step_that_is_left_out_leaves_momentum_at_nothing() -> None:
    weights = parameters((3, 2))
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    stepper = CapturableOptimizer(optimizer, CPU, skips=True)
    stepper.step(torch.ones(()))
    assert torch.equal(weights[0], torch.ones(3, 2))
    stepper.step(torch.zeros(()))
    torch.testing.assert_close(weights[0], torch.full((3, 2), 0.8))
    assert torch.equal(optimizer.state[weights[0]]["momentum_buffer"], torch.full((3, 2), 2.0))


def test_some_parameters_are_stepped_and_then_others() -> None:
    together, apart = parameters((3,), (2, 2)), parameters((3,), (2, 2))
    CapturableOptimizer(torch.optim.AdamW(together, lr=0.1), CPU).step()
    stepper = CapturableOptimizer(torch.optim.AdamW(apart, lr=0.1), CPU)
    for parameter in reversed(apart):
        stepper.step(only=[parameter])
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    assert [len(group["params"]) for group in stepper.optimizer.param_groups] == [2]


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_what_no_fused_optimizer_takes_is_stepped_by_another(made: type[torch.optim.Optimizer]) -> None:
    strange = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    strange.grad = torch.ones_like(strange)
    CapturableOptimizer(made([strange], lr=0.1), CPU).step()  # pyright: ignore[reportCallIssue]
    assert strange.real.max() < 1


def test_sparse_gradients_are_learned_from() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, words_B: Tensor) -> Tensor:
            return self.last(self.words(words_B.long()).mean(1))

    inputs = np.arange(32, dtype=np.int64).reshape(16, 2) % 9
    fitted = penstock.fit(
        Words(),
        train=(inputs, np.arange(16) % 2),
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
        epochs=2,
        quiet=True,
    )
    assert math.isfinite(fitted.history[-1]["train_loss"])


def test_what_needs_several_losses_a_step_is_refused() -> None:
    with pytest.raises(TrainError, match="LBFGS computes a step's loss several times"):
        CapturableOptimizer(torch.optim.LBFGS(parameters((2,))), CPU)
