"""Augmentation of batches on a GPU: by the same chance as on the CPU, to the rounding of its arithmetic."""

import pytest
import torch
from torch import Tensor

from penstock.apps.digits.recipe import augment as digits
from penstock.apps.keywords.recipe import SIGNAL
from penstock.apps.keywords.recipe import augment as keywords
from penstock.nn import LogMel
from penstock.train.data.augment import Augment, in_turn, mixup, random_flip

pytestmark = pytest.mark.gpu


def pictures() -> Tensor:
    return torch.randint(256, (64, 28, 28), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def sound() -> Tensor:
    return torch.randint(-9000, 9000, (8, SIGNAL), generator=torch.Generator().manual_seed(0)).to(torch.int16)


@pytest.mark.parametrize(
    ("augment", "inputs", "apart"),
    [
        (digits, pictures(), 0.05),
        (keywords, sound(), 0.5),
        (random_flip(), pictures(), 0),
        (mixup(5), pictures(), 0.05),
        (in_turn(random_flip(), mixup(5)), pictures(), 0.05),
    ],
    ids=["digits", "keywords", "flip", "mixup", "in turn"],
)
def test_batches_are_those_of_the_cpu(augment: Augment, inputs: Tensor, apart: float) -> None:
    labels = torch.arange(len(inputs)) % 5
    made, targets = augment(inputs, labels, torch.Generator().manual_seed(3))
    on_gpu, targets_on_gpu = augment(inputs.cuda(), labels.cuda(), torch.Generator().manual_seed(3))
    assert on_gpu.is_cuda
    assert targets_on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), made, rtol=1e-4, atol=apart)
    torch.testing.assert_close(targets_on_gpu.cpu(), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_spectrum_under_autocast_is_that_of_float32(dtype: torch.dtype) -> None:
    layer = LogMel().cuda()
    plain = layer(sound().cuda())
    with torch.autocast("cuda", dtype):
        assert torch.equal(layer(sound().cuda()), plain)
