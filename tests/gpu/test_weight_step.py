"""The kernel that steps many weights at once beside its reference, launched and captured."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.weight_step import Weights, reference
from penstock.kernels.weight_step.shapes import SHAPES

pytestmark = pytest.mark.gpu

RATE = 0.05
Shapes = tuple[tuple[int, ...], ...]


def made(shapes: Shapes, momentum: float) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    torch.manual_seed(len(shapes))
    weights = [torch.randn(shape, device="cuda") for shape in shapes]
    momenta = [torch.randn_like(weight) for weight in weights] if momentum else []
    copies = [weight.to(torch.bfloat16) if index % 3 != 1 else None for index, weight in enumerate(weights)]
    return weights, momenta, copies


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [(0.0, 0.0, False), (0.9, 5e-4, False), (0.9, 5e-4, True)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_kernel_takes_the_references_steps(
    shapes: Shapes, settings: tuple[float, float, bool], gradient_type: torch.dtype
) -> None:
    values: dict[str, Any] = dict(zip(("momentum", "decay", "nesterov"), settings, strict=True))
    ours, theirs = made(shapes, settings[0]), made(shapes, settings[0])
    rate = torch.tensor(RATE, device="cuda")
    together = Weights(*ours)
    for _ in range(3):
        gradients = [torch.randn(shape, device="cuda").to(gradient_type) for shape in shapes]
        together.sgd(gradients, rate, **values)
        reference.sgd(*theirs[:1], gradients, *theirs[1:], rate, **values)
    for mine, right in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    for weight, copy in zip(ours[0], ours[2], strict=True):
        assert copy is None or torch.equal(copy, weight.to(torch.bfloat16))


def test_a_captured_step_is_the_launched_one() -> None:
    shapes = SHAPES[2]
    launched, captured = made(shapes, 0.9), made(shapes, 0.9)
    rate = torch.tensor(RATE, device="cuda")
    one, other = Weights(*launched), Weights(*captured)
    source = [torch.randn(shape, device="cuda") for shape in shapes]
    values: dict[str, Any] = {"momentum": 0.9, "decay": 1e-3, "nesterov": False}
    for together in (one, other):
        together.sgd([tensor.to(torch.bfloat16) for tensor in source], rate, **values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.sgd([(2 * tensor).to(torch.bfloat16) for tensor in source], rate, **values)
    other.settle()
    for factor in (0.5, 1.0):
        rate.fill_(RATE * factor)
        one.sgd([(2 * tensor).to(torch.bfloat16) for tensor in source], rate, **values)
        graph.replay()
        for mine, right in zip(launched[0] + launched[1], captured[0] + captured[1], strict=True):
            assert torch.equal(mine, right)


def test_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    weights, momenta, copies = made(((8192, 8192), (64, 64, 3, 3), (64,)), 0.9)
    gradients = [torch.randn_like(weight, dtype=torch.bfloat16) for weight in weights]
    together = Weights(weights, momenta, copies)
    rate = torch.tensor(RATE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    together.sgd(gradients, rate, momentum=0.9, decay=1e-4, nesterov=False)
    with torch.cuda.graph(graph):
        for _ in range(10):
            together.sgd(gradients, rate, momentum=0.9, decay=1e-4, nesterov=False)
    together.settle()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / 10
    with capsys.disabled():
        print(f" {20 * 8192 * 8192 / seconds / 1e12:.2f} TB/s", end="")
