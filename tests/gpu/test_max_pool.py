"""The kernel of max pooling beside its reference, forward and backward, and where torch compiles around it."""

import pytest
import torch
from torch import nn

from penstock.kernels.max_pool import max_pool, reference
from penstock.nn import MaxPool2d

# Batch, channels, height, width; kernel, stride, padding.
SHAPES = (
    ((1, 1, 5, 4), (3, 2, 0)),
    ((2, 3, 7, 9), (3, 2, 1)),
    ((3, 130, 6, 6), (4, 2, 2)),
    ((2, 24, 9, 8), (3, 1, 1)),
    ((2, 8, 11, 7), (5, 3, 0)),
    ((64, 64, 55, 55), (3, 2, 0)),
    ((64, 192, 27, 27), (3, 2, 0)),
    ((64, 64, 112, 112), (3, 2, 1)),
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "sides"), SHAPES, ids=str)
def test_the_kernel_gives_the_references_answers(
    shape: tuple[int, ...], sides: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(shape))
    x_BCHW = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    given = [x_BCHW.clone().requires_grad_() for _ in range(2)]
    made, right = max_pool(given[0], *sides), reference.max_pool(given[1], *sides)
    assert made.grad_fn is not None
    assert "MaxPool2D" not in made.grad_fn.name()
    assert torch.equal(made, right)
    weights = torch.randn_like(right)
    torch.full_like(x_BCHW, torch.nan)  # what is not written is likely this
    (ours,) = torch.autograd.grad(made, given[0], weights)
    (theirs,) = torch.autograd.grad(right, given[1], weights)
    # The reference may add what several windows give to one number in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype is not torch.float32 else 1e-6, atol=1e-2)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates itself
def test_torch_compiles_around_it() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), MaxPool2d(3, 2), nn.ReLU(), nn.Conv2d(16, 8, 3)).cuda()
    network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x_BCHW = torch.randn(4, 8, 17, 17, device="cuda").contiguous(memory_format=torch.channels_last)
    gradients = []
    for run in (network, torch.compile(network, fullgraph=True)):
        network.zero_grad()
        run(x_BCHW).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
