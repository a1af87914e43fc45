import pytest
import torch

from penstock.core.errors import ApplicationError
from penstock.models.mlp import ACTIVATIONS, MLP, Activation


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_gives_logits_and_probabilities_of_raw_pixels(activation: Activation) -> None:
    torch.manual_seed(0)
    network = MLP(inputs=64, hidden=(16, 8), classes=10, activation=activation)
    raw = torch.randint(0, 256, (5, 8, 8), dtype=torch.uint8)
    assert network(raw).shape == (5, 10)
    assert torch.allclose(network.predict(raw).sum(1), torch.ones(5))
    network(raw).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_no_hidden_layer_is_a_linear_classifier() -> None:
    network = MLP(inputs=4, hidden=(), classes=2, activation="relu", scale=1.0)
    assert [tuple(parameter.shape) for parameter in network.parameters()] == [(2, 4), (2,)]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ApplicationError, match=r"'swish'; choose one of tanh, sigmoid, relu, maxout"):
        MLP(inputs=4, hidden=(2,), classes=2, activation="swish")  # pyright: ignore[reportArgumentType]
