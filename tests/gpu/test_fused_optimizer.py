"""The kernel that steps many weights at once beside its reference, launched and captured."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.fused_optimizer import Adam, Sgd, Weights, reference

# Weights that are updated together.
SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,),),
    ((7,), (2048,), (2049,), (5, 3)),
    ((64, 3, 11, 11), (64,), (192, 64, 5, 5), (192,)),
    ((4096, 4608), (4096,), (1000, 4096)),
)

pytestmark = pytest.mark.gpu

RATE = 0.05
Shapes = tuple[tuple[int, ...], ...]


def made(shapes: Shapes) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, copies, and what an optimizer may keep of them."""
    torch.manual_seed(len(shapes))
    weights = [torch.randn(shape, device="cuda") for shape in shapes]
    copies = [weight.to(torch.bfloat16) if index % 3 != 1 else None for index, weight in enumerate(weights)]
    steps = [torch.zeros((), device="cuda") for _ in shapes]
    return weights, copies, [torch.randn_like(each) for each in weights], [each.square() for each in weights], steps


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [(0.0, 0.0, False), (0.9, 5e-4, False), (0.9, 5e-4, True)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_kernel_takes_the_references_steps(
    shapes: Shapes, settings: tuple[float, float, bool], gradient_type: torch.dtype
) -> None:
    rule = Sgd(momentum=settings[0], decay=settings[1], nesterov=settings[2])
    ours, theirs = made(shapes), made(shapes)
    rate = torch.tensor(RATE, device="cuda")
    together = Weights(*ours[:2])
    momenta = [each[2] if settings[0] else [] for each in (ours, theirs)]
    for _ in range(3):
        gradients = [torch.randn(shape, device="cuda").to(gradient_type) for shape in shapes]
        together.step(rule, gradients, rate, momenta[0])
        reference.sgd(rule, *theirs[:2], gradients, rate, momenta[1])
    _check(ours, theirs)


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_kernel_takes_the_references_steps_of_adam(
    shapes: Shapes, gradient_type: torch.dtype, *, decoupled: bool
) -> None:
    ours, theirs = made(shapes), made(shapes)
    rate = torch.tensor(RATE, device="cuda")
    together = Weights(*ours[:2])
    rule = Adam(betas=(0.9, 0.999), eps=1e-8, decay=0.01, decoupled=decoupled)
    for _ in range(3):
        gradients = [torch.randn(shape, device="cuda").to(gradient_type) for shape in shapes]
        for step in ours[4] + theirs[4]:
            step.add_(1)
        together.step(rule, gradients, rate, *ours[2:])
        reference.adam(rule, *theirs[:2], gradients, rate, *theirs[2:])
    _check(ours, theirs)


def _check(ours: Any, theirs: Any) -> None:
    for which in (0, 2, 3):
        for mine, right in zip(ours[which], theirs[which], strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    for weight, copy in zip(ours[0], ours[1], strict=True):
        assert copy is None or torch.equal(copy, weight.to(torch.bfloat16))


def test_a_captured_step_is_the_launched_one() -> None:
    shapes = SHAPES[2]
    launched, captured = made(shapes), made(shapes)
    rate = torch.tensor(RATE, device="cuda")
    one, other = Weights(*launched[:2]), Weights(*captured[:2])
    source = [torch.randn(shape, device="cuda") for shape in shapes]
    rule = Sgd(momentum=0.9, decay=1e-3, nesterov=False)
    for together, state in ((one, launched), (other, captured)):
        together.step(rule, [tensor.to(torch.bfloat16) for tensor in source], rate, state[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step(rule, [(2 * tensor).to(torch.bfloat16) for tensor in source], rate, captured[2])
    other.finish_capture()
    for factor in (0.5, 1.0):
        rate.fill_(RATE * factor)
        one.step(rule, [(2 * tensor).to(torch.bfloat16) for tensor in source], rate, launched[2])
        graph.replay()
        for mine, right in zip(launched[0] + launched[2], captured[0] + captured[2], strict=True):
            assert torch.equal(mine, right)


def test_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    weights, copies, momenta, squares, steps = made(((8192, 8192), (64, 64, 3, 3), (64,)))
    gradients = [torch.randn_like(weight, dtype=torch.bfloat16) for weight in weights]
    rate = torch.tensor(RATE, device="cuda")

    sgd = Sgd(momentum=0.9, decay=1e-4, nesterov=False)
    adam = Adam(betas=(0.9, 0.999), eps=1e-8, decay=0.1, decoupled=True)

    # Read and written of each number: gradient, weight, copy, state.
    for rule, state, bytes_of_one in ((sgd, [momenta], 20), (adam, [momenta, squares, steps], 28)):
        together, graph = Weights(weights, copies), torch.cuda.CUDAGraph()
        together.step(rule, gradients, rate, *state)
        with torch.cuda.graph(graph):
            for _ in range(10):
                together.step(rule, gradients, rate, *state)
        together.finish_capture()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3 / 10
        with capsys.disabled():
            print(f" {type(rule).__name__} {bytes_of_one * 8192 * 8192 / seconds / 1e12:.2f} TB/s", end="")
