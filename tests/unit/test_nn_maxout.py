import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import ApplicationError
from penstock.nn import Maxout


def test_linear_maxout_is_the_largest_affine_piece_of_each_unit() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3 * 4).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    weight, bias = layer.weight.detach().numpy().reshape(3, 4, 5), layer.bias.detach().numpy().reshape(3, 4)
    expected = (np.einsum("bi,uki->buk", x.numpy(), weight) + bias).max(2)
    np.testing.assert_allclose(Maxout(4)(layer(x)).detach().numpy(), expected, rtol=1e-12)


def test_convolution_maxout_is_the_largest_filter_of_each_channel() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 6, 3).double()
    x = torch.randn(4, 2, 8, 7, dtype=torch.float64)
    every = convolution(x).detach().numpy()
    expected = np.stack([every[:, 2 * channel : 2 * channel + 2].max(1) for channel in range(3)], 1)
    np.testing.assert_allclose(Maxout(2)(convolution(x)).detach().numpy(), expected)


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_gradients_are_right_along_any_dimension(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Maxout(3, dim), (x,))


def test_one_piece_changes_nothing() -> None:
    x = torch.randn(2, 5)
    assert torch.equal(Maxout(1)(x), x)


def test_two_pieces_can_be_the_absolute_value() -> None:
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0], [-1.0]])
    assert Maxout(2)(layer(torch.tensor([[-3.0], [2.0]]))).flatten().tolist() == [3.0, 2.0]


def test_mistakes_are_said() -> None:
    with pytest.raises(ApplicationError, match="0 pieces; give it at least 1"):
        Maxout(0)
    with pytest.raises(ApplicationError, match="3 pieces got 4 features in dimension 1"):
        Maxout(3)(torch.zeros(2, 4))
