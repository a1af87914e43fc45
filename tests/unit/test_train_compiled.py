"""A network compiled in parts: its answers, its names, and when its gradients are there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.train.step.compile import compiled, should_split

# Torch's compiler warns of what it does itself.
pytestmark = pytest.mark.filterwarnings("ignore")


class Counted:
    """A compiler that changes nothing and counts what it is given."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return aot_autograd(fw_compiler=lambda made, _: made)(graph, examples)


class Waits(nn.Linear):
    """As a layer that waits for other processes."""

    compiling: bool = False

    def forward(self, input: Tensor) -> Tensor:
        Waits.compiling |= torch.compiler.is_compiling()
        return super().forward(input)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.waits = nn.Linear(8, 8), Waits(8, 8)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), self.middle, nn.ReLU())
        self.last = nn.Sequential(nn.Dropout(0.0), self.waits, nn.ReLU(), nn.Linear(8, 3))

    def forward(self, given: Tensor) -> Tensor:
        return self.last(self.first(given) * 2)


def weight_of(layer: nn.Linear) -> nn.Parameter:
    (weight,) = (parameter for name, parameter in layer.named_parameters() if name == "weight")
    return weight


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_gradients_leave_each_part_when_it_has_made_them() -> None:
    net, counted, seen = Net(), Counted(), list[str]()
    names, inputs = list(net.state_dict()), torch.randn(5, 4)
    expected = net(inputs)
    wanted = torch.autograd.grad(expected.sum(), [*net.parameters()])
    network = compiled(net, [weight_of(net.middle)], [net.waits], backend=counted)
    found = network(inputs)
    torch.testing.assert_close(found, expected)
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    found.sum().backward()
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert [name.split(".")[0] for name in sorted(seen[:4])] == ["last", "last", "waits", "waits"]
    assert [name.split(".")[0] for name in seen[4:]] == ["middle", "middle", "first", "first"]
    assert list(net.state_dict()) == names
    assert not Waits.compiling
    # [Linear, ReLU], [Linear, ReLU], the product, [Dropout], [ReLU, Linear].
    assert sorted(counted.graphs) == [1, 1, 2, 2, 2]


def test_what_is_validated_is_not_compiled() -> None:
    net, counted = Net(), Counted()
    compiled(net, [weight_of(net.middle)], [net.waits], backend=counted)
    net.eval()
    for count in (2, 3, 5):
        assert net(torch.randn(count, 4)).shape == (count, 3)
    assert not counted.graphs


@pytest.mark.thorough
def test_many_parts_are_all_compiled() -> None:
    # Of other sizes each: what is alike is compiled once.
    layers, counted = [nn.Linear(4 + index, 5 + index) for index in range(12)], Counted()
    net = nn.Sequential(*layers)
    found = compiled(net, [weight_of(layer) for layer in layers], [], backend=counted)(torch.randn(2, 4))
    assert found.shape == (2, 16)
    assert counted.graphs == [1] * 12


def test_a_network_without_chains_is_compiled_as_one() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, given: Tensor) -> Tensor:
            return self.two(self.one(given).relu())

    net, counted = Plain(), Counted()
    inputs = torch.randn(3, 4)
    expected = net(inputs)
    torch.testing.assert_close(compiled(net, [weight_of(net.two)], [], backend=counted)(inputs), expected)
    assert len(counted.graphs) == 1


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def test_a_chain_with_a_forward_of_its_own_stays_what_it_is() -> None:
    middle = nn.Linear(4, 4)
    net, inputs = Residual(nn.Linear(4, 4), nn.ReLU(), middle), torch.randn(3, 4)
    expected = net(inputs)
    torch.testing.assert_close(compiled(net, [weight_of(middle)], [], backend=Counted())(inputs), expected)
    torch.testing.assert_close(net(inputs), expected)


def test_parts_are_worth_it_where_gradients_travel_long_beside_the_arithmetic() -> None:
    # ResNet-50 at 1,024 over two GPUs, and at 256 over four: seconds at the device's peak.
    all_reduce_bytes = 51_000_000
    assert not should_split(all_reduce_bytes, 12.7e-3)
    assert should_split(all_reduce_bytes, 1.6e-3)
    assert should_split(all_reduce_bytes, None)
