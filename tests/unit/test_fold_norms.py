"""Batch norms folded into convolutions: the same answers, and nothing folded that must not be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.models.resnet import ResNet50
from penstock.runtime.gpu.fold_norms import find_folds, fold_norms

PICTURES = torch.rand(2, 3, 8, 8)


def unlike(network: nn.Module) -> nn.Module:
    """Statistics and weights as after a training."""
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
                if tensor is not None:
                    tensor.data.uniform_(0.5, 1.5)
    return network.eval()


def norms(network: nn.Module) -> int:
    return sum(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in network.modules())


class Block(nn.Module):
    """The norms are declared before the convolutions, and run in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=True)])
        self.first = nn.Conv2d(3, 4, 3, bias=False)
        self.second = nn.Conv2d(4, 4, 3, groups=2)

    def forward(self, pictures: Tensor) -> Tensor:
        found = self.norms[1](self.first(pictures)).relu()
        return self.norms[0](self.second(found))


class Twice(nn.Module):
    """One convolution, two norms behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.one, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.one(self.first(pictures)) + self.other(self.first(pictures))


class Read(nn.Module):
    """The output of the convolution is used beside its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, pictures: Tensor) -> Tensor:
        found = self.first(pictures)
        return self.norm(found) + found


class Active(nn.BatchNorm2d):
    """A norm that does more, as timm's do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Hosts(nn.Module):
    """Cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.norm(self.first(pictures)) * float(pictures.sum())


def hooked() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def doubled(_layer: nn.Module, _given: object, found: Tensor) -> Tensor:
        return found * 2

    network[1].register_forward_hook(doubled)
    return network


def with_parametrization() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (Block, 0),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), 1),
        (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), 1),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), 1),
        (Twice, 2),
        (Read, 1),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Active(4)), 1),
        (Hosts, 1),
        (hooked, 1),
        (with_parametrization, 1),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)), 0),
        (lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Conv3d(3, 5, 2), nn.BatchNorm3d(5)), 0),
    ],
)
def test_only_norms_that_follow_a_convolution_alone_are_folded(make: Callable[[], nn.Module], left: int) -> None:
    torch.manual_seed(0)
    network = unlike(make())
    with torch.inference_mode():
        expected = network(PICTURES)
    before = norms(network)
    folds = find_folds(network, [PICTURES])
    assert len(folds) == before - left
    fold_norms(network, folds)
    assert norms(network) == left
    with torch.inference_mode():
        torch.testing.assert_close(network(PICTURES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_all_norms_of_a_residual_network_are_folded() -> None:
    torch.manual_seed(0)
    network = unlike(ResNet50(5))
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    with torch.inference_mode():
        expected = network(pixels)
        folds = find_folds(network, [pixels])
        assert len(folds) == 53
        fold_norms(network, folds)
        found = network(pixels)
    assert norms(network) == 0
    assert (found - expected).norm() < 1e-4 * expected.norm()
