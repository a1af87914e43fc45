"""Muon on a GPU: matrices in bf16, and steps that a CUDA graph captures."""

import pytest
import torch
from torch import Tensor, nn

from penstock.train.step.capturable_optimizer import CapturableOptimizer
from penstock.train.step.muon import Muon, orthogonal

pytestmark = pytest.mark.gpu


def named() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Conv2d(3, 16, 5), nn.GRU(32, 64), nn.Linear(64, 8)])
    return list(layers.cuda().named_parameters())


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    return [torch.randn(weight.shape, generator=generator, device="cuda") for _, weight in named()]


def test_a_captured_step_gives_the_bits_of_a_launched_one() -> None:
    ends: list[list[Tensor]] = []
    for captured in (False, True):
        weights = named()
        optimizer = Muon(weights, lr=0.1)
        stepper = CapturableOptimizer(optimizer, torch.device("cuda"))
        assert stepper.why_eager is None
        for (_, weight), grad in zip(weights, gradients(0), strict=True):
            weight.grad = grad
        # The first step makes the state.
        stepper.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            before = [weight.detach().clone() for _, weight in weights]
            kept = [(value, value.clone()) for values in optimizer.state.values() for value in values.values()]
            with torch.cuda.graph(graph):
                stepper.step()
            torch.cuda.synchronize()
            for (_, weight), was in zip(weights, before, strict=True):
                weight.data.copy_(was)
            for value, was in kept:
                value.copy_(was)
        for step in range(1, 5):
            for (_, weight), grad in zip(weights, gradients(step), strict=True):
                assert weight.grad is not None
                weight.grad.copy_(grad)
            optimizer.param_groups[0]["lr"] = 0.1 / step
            stepper.upload_rates()
            if captured:
                graph.replay()
            else:
                stepper.step()
        ends.append([weight.detach().clone() for _, weight in weights])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_matrices_in_bf16_are_near_those_in_float32() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 512, 320)
    made, right = orthogonal(given.cuda()).float().cpu(), orthogonal(given)
    assert torch.linalg.vector_norm(made - right) / torch.linalg.vector_norm(right) < 0.05
