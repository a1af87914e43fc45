"""The kernel that copies many tensors at once beside torch's copies, launched and captured."""

import pytest
import torch

from penstock.kernels.multi_tensor_copy import Copies

pytestmark = pytest.mark.gpu

SHAPES = ((1,), (7,), (2048,), (2049,), (64, 3, 11, 11), (192, 64, 5, 5), (1000, 512))


@pytest.mark.parametrize("target_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source_type", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_kernel_copies(source_type: torch.dtype, target_type: torch.dtype) -> None:
    targets = [torch.full(shape, torch.nan, device="cuda", dtype=target_type) for shape in SHAPES]
    copies = Copies(targets)
    for step in range(2):
        sources = [torch.randn(shape, device="cuda").to(source_type) for shape in SHAPES]
        if step:
            sources[5] = sources[5].contiguous(memory_format=torch.channels_last)
        copies.fill(sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.to(target_type))


def test_captured_copies_are_of_what_was_captured() -> None:
    targets = [torch.zeros(shape, device="cuda") for shape in SHAPES]
    given = [torch.randn(shape, device="cuda") for shape in SHAPES]
    copies = Copies(targets)
    copies.fill(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies.fill([2 * tensor for tensor in given])
    copies.finish_capture()
    for _ in range(2):
        for tensor in given:
            tensor.add_(1)
        graph.replay()
        for target, source in zip(targets, given, strict=True):
            assert torch.equal(target, 2 * source)
