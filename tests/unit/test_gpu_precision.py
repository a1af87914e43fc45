"""Precisions of networks on a GPU, on a CPU: which weights are converted, and what the network then answers."""

import pytest
import torch
from torch import Tensor, nn

from penstock.core.spec import TensorSpec
from penstock.runtime.gpu.gpu_network import GpuNetwork, gpu_network
from penstock.runtime.gpu.precision import GpuWay, reduced, ways_of

INPUT = TensorSpec(dtype="uint8", shape=(8, 8, 3), meaning="pixels")
OUTPUT = TensorSpec(dtype="float32", shape=(5,), meaning="scores")


class Classifier(nn.Module):
    """A network that prepares its input in float32 whatever its weights are, as most do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.place = nn.Parameter(torch.randn(16))
        self.inner = nn.LayerNorm(16)
        self.out = nn.Linear(16, 5)
        self.register_buffer("mean", torch.full((3,), 127.5))

    def forward(self, pixels: Tensor) -> Tensor:
        picture = (pixels.float() - self.mean).permute(0, 3, 1, 2) / 127.5
        return self.out(self.inner(self.norm(self.convolution(picture)).relu().mean((2, 3)) + self.place))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().eval()


def kinds(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in module.state_dict().items()}


def test_norms_and_buffers_stay_in_fp32_and_the_network_itself_is_unchanged(network: nn.Module) -> None:
    before = kinds(network)
    found = kinds(reduced(network, GpuWay(precision="bf16")))
    low = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    assert low == {"convolution.weight", "convolution.bias", "place", "out.weight", "out.bias"}
    products = kinds(reduced(network, GpuWay(precision="fp16", weights="products")))
    assert {name for name, dtype in products.items() if dtype == torch.float16} == low - {"place"}
    assert kinds(reduced(network, GpuWay(precision="tf32"))) == before == kinds(network)


def test_a_weight_that_a_norm_shares_stays_in_fp32() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert isinstance(network[0], nn.Linear)
    network[0].bias = network[1].weight
    found = kinds(reduced(network, GpuWay(precision="bf16")))
    assert (found["0.weight"], found["0.bias"]) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("way", ways_of("bf16"))
def test_a_network_that_prepares_in_fp32_answers_in_bf16(network: nn.Module, way: GpuWay) -> None:
    pixels = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    with torch.inference_mode():
        (found,) = gpu_network(network, INPUT, OUTPUT, way, "cpu")(pixels)
        expected = network(pixels)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_of_products_alone_give_the_numbers_of_autocast(network: nn.Module) -> None:
    pixels = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    with torch.inference_mode():
        (found,) = gpu_network(network, INPUT, OUTPUT, GpuWay(precision="bf16", weights="products"), "cpu")(pixels)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            expected = network(pixels).float()
    assert torch.equal(found, expected)


def test_channels_last_changes_the_memory_of_weights_alone(network: nn.Module) -> None:
    other = reduced(network, GpuWay(precision="fp32", channels_last=True))
    weight = other.get_parameter("convolution.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, network.get_parameter("convolution.weight"))


def test_an_output_has_its_declared_dtype() -> None:
    whole = TensorSpec(dtype="int64", shape=(2,), meaning="numbers")
    network = GpuNetwork(nn.Identity(), TensorSpec(dtype="float32", shape=(2,), meaning="numbers"), whole, "fp32")
    (found,) = network(torch.tensor([[1.0, 2.0]]))
    assert found.tolist() == [[1, 2]]
    assert found.dtype == torch.int64
