"""Multilayer perceptron with a choice of activations."""

from itertools import pairwise
from typing import Literal, final

from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.nn import Maxout

# B batch, F features, C classes

Activation = Literal["tanh", "sigmoid", "relu", "maxout"]
ELEMENTWISE = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
ACTIVATIONS = (*ELEMENTWISE, "maxout")
PIECES = 2


@final
class MLP(nn.Module):
    """Fully connected layers with one activation between them, over raw inputs.

    Args:
        inputs: Number of elements of a raw input.
        hidden: Units of each hidden layer.
        classes: Outputs. With a million classes nearly all parameters belong to `head`.
        activation: `"tanh"`, `"sigmoid"`, `"relu"` or `"maxout"` (two pieces, in layers twice as wide).
        scale: Divisor of the raw numbers, so that inputs are about 0 to 1.

    Raises:
        ApplicationError: There is no such activation.
    """

    def __init__(
        self, *, inputs: int, hidden: tuple[int, ...], classes: int, activation: Activation, scale: float = 255.0
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ApplicationError(f"there is no activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}.")
        self.scale = scale
        layers: list[nn.Module] = []
        for before, units in pairwise((inputs, *hidden)):
            layers += _layer(before, units, activation)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1] if hidden else inputs, classes)

    def forward(self, raw: Tensor) -> Tensor:
        """Logits `[B, C]` of raw inputs `[B, ...]`."""
        return self.head(self.layers(raw.float().flatten(1) / self.scale))

    def predict(self, raw: Tensor) -> Tensor:
        """The probability of each class, `[B, C]`."""
        return self(raw).softmax(1)


def _layer(inputs: int, units: int, activation: Activation) -> list[nn.Module]:
    if activation == "maxout":
        return [nn.Linear(inputs, units * PIECES), Maxout(PIECES)]
    return [nn.Linear(inputs, units), ELEMENTWISE[activation]()]
