"""A wide multilayer perceptron with random weights, 48 MFLOP a request: most of its time is the network's own."""

from penstock import Application, TensorSpec
from penstock.models.mlp import MLP

SIDE = 28
# 2 * (784 * 4096 + 4096 * 4096 + 4096 * 972 + 972 * 10) = 48.0 million multiplications and additions.
HIDDEN = (4096, 4096, 972)


def network() -> MLP:
    """784 inputs, three hidden layers, ten outputs."""
    return MLP(inputs=SIDE * SIDE, hidden=HIDDEN, classes=10, activation="relu")


app = Application(
    name="mlp",
    description="A wide multilayer perceptron with random weights.",
    input=TensorSpec(dtype="uint8", shape=(SIDE, SIDE), meaning="grey picture", units="0..255", name="image"),
    output=TensorSpec(dtype="float32", shape=(10,), meaning="probability of each class", name="probabilities"),
    model=":network",
)
