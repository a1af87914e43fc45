"""The first convolution on blocks of pixels: the same sums as torch's own."""

import pytest
import torch
from torch import nn

from penstock.core.errors import ApplicationError
from penstock.nn import EntryConv2d


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "height", "width"),
    [(11, 4, 2, 224, 224), (7, 2, 3, 33, 64), (16, 16, 0, 32, 48), (3, 2, 1, 5, 6), (3, 2, 0, 6, 3), (2, 3, 0, 8, 11)],
)
def test_blocks_give_the_same_sums_and_gradients(
    kernel: int, stride: int, padding: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    entry = EntryConv2d(3, 8, kernel, stride=stride, padding=padding).double()
    plain = nn.Conv2d(3, 8, kernel, stride=stride, padding=padding).double()
    plain.load_state_dict(entry.state_dict())
    x_BCHW = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    ours, theirs = entry.by_blocks(x_BCHW), plain(x_BCHW)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(theirs)
    gradients = torch.autograd.grad((ours * weights).sum(), [x_BCHW, *entry.parameters()])
    expected = torch.autograd.grad((theirs * weights).sum(), [x_BCHW, *plain.parameters()])
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_on_a_cpu_it_is_the_plain_convolution() -> None:
    torch.manual_seed(0)
    entry = EntryConv2d(3, 4, 7, stride=2, padding=3)
    x_BCHW = torch.randn(1, 3, 20, 20)
    assert torch.equal(entry(x_BCHW), nn.functional.conv2d(x_BCHW, entry.weight, entry.bias, 2, 3))


def test_a_stride_of_one_is_refused() -> None:
    with pytest.raises(ApplicationError, match=r"stride of 1; use torch\.nn\.Conv2d"):
        EntryConv2d(3, 4, 3, stride=1)
