"""Rewrites of recorded runs: the same answers by fewer operations, and nothing rewritten that must not be."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.runtime.gpu.compiled_network import CompiledNetwork, compile_network
from penstock.runtime.gpu.recorded import recorded, state_of
from penstock.runtime.gpu.rewrite_graph import rewrite_graph

WIDTH, TOKENS = 64, 6


def operations(graph: GraphModule) -> Counter[str]:
    return Counter(str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function")


def rewritten(network: nn.Module, given: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[int, GraphModule]:
    """Rewrite a run, and check that the answers stay."""
    network, given = network.to(dtype).eval().requires_grad_(False), given.to(dtype)
    graph = recorded(network, [given])
    flat = [*state_of(network).values(), given]
    before = graph(*flat)
    count = rewrite_graph(graph)
    torch.testing.assert_close(graph(*flat), before, rtol=0.05, atol=0.02)
    return count, graph


def encoder(layers: int = 2, activation: str = "gelu") -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, activation=activation, batch_first=True)
    # Not by torch's one kernel for a layer, which autocast turns off too.
    layer.register_forward_hook(lambda *_: None)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_an_encoder_of_torch_loses_its_passes_over_memory(activation: str) -> None:
    given = torch.randn(3, TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        network = encoder(activation=activation).bfloat16().eval().requires_grad_(False)
        before = operations(recorded(network, [given.bfloat16()]))
        count, graph = rewritten(encoder(activation=activation), given)
    after = operations(graph)
    assert before[f"{activation}.default"] == before["bmm.default"] == before["clone.default"] == 2
    # By layer: an activation, a product, and three tensors that attention reads.
    assert count == 2 * (1 + 1 + 3)
    assert not {f"{activation}.default", "bmm.default", "clone.default"} & set(after)
    assert after["_addmm_activation.default"] == 2
    assert after["addmm.default"] == 2 * 3


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_rewritten_compiles(tmp_path: Path) -> None:
    network = encoder(1).bfloat16().eval().requires_grad_(False)
    given = torch.randn(3, TOKENS, WIDTH, dtype=torch.bfloat16)

    class Tupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16):
                return (self.network(tokens),)

    whole = Tupled()
    compile_network(whole, [given], tmp_path / "compiled")
    (answer,) = CompiledNetwork(tmp_path / "compiled", whole, "bf16")(given)
    torch.testing.assert_close(answer, whole(given)[0], rtol=0.05, atol=0.03)


class Twice(nn.Module):
    """What the linear layer gives is used beside its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)

    def forward(self, given: Tensor) -> Tensor:
        found = self.first(given)
        return found + found.relu()


class Converted(nn.Module):
    """The activation is not computed in the product's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.gelu(self.first(given).float())


class Sum(nn.Module):
    """The sum of a product with a matrix, which is no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(4, 16))

    def forward(self, given: Tensor) -> Tensor:
        return torch.addmm(self.shift, given, self.weight).relu()


class Batches(nn.Module):
    """A batch of products, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, given: Tensor) -> Tensor:
        return torch.bmm(given[:, None].expand(4, 3, 8), self.weight) + self.shift


class Reordered(nn.Module):
    """Queries whose features lie apart: attention needs the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)

    def forward(self, given: Tensor) -> Tensor:
        found = self.first(given).view(2, 2, 4, 16).permute(0, 1, 3, 2).contiguous()
        return nn.functional.scaled_dot_product_attention(found, found, found)


class Merged(nn.Module):
    """Queries whose dimension is two of the product's, which have no common stride."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)

    def forward(self, given: Tensor) -> Tensor:
        found = self.first(given).view(2, 4, 4, 16).transpose(1, 2).contiguous().view(1, 2, 16, 16)
        found = found.view(2, 1, 16, 16)
        return nn.functional.scaled_dot_product_attention(found, found, found)


@pytest.mark.parametrize(
    ("network", "shape", "dtype"),
    [
        (Twice, (4, 8), torch.bfloat16),
        (Converted, (4, 8), torch.bfloat16),
        (Sum, (4, 8), torch.bfloat16),
        (Batches, (4, 8), torch.bfloat16),
        (Reordered, (4, 16), torch.bfloat16),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU()), (4, 8), torch.float32),
        (lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU()), (4, 8), torch.bfloat16),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh()), (4, 8), torch.bfloat16),
    ],
)
def test_what_stays(network: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    count, _ = rewritten(network(), torch.randn(shape), dtype)
    assert count == 0


def test_a_copy_of_merged_dimensions_is_right() -> None:
    torch.manual_seed(0)
    _, graph = rewritten(Merged(), torch.randn(8, 16))
    assert operations(graph)["clone.default"] == 1
