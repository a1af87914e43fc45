"""A small convolutional network over 28 x 28 pictures, with random weights, for the comparison of servers."""

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Application, TensorSpec

# B batch, H height, W width, C channels

SIDE = 28


@final
class CNN(nn.Module):
    """Two convolutions of stride 2 and two linear layers: 105,866 parameters, 0.71 MFLOP a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * (SIDE // 4) ** 2, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, pixels_BHW: Tensor) -> Tensor:
        """Logits `[B, 10]` of raw pixels `[B, 28, 28]`."""
        ink_BCHW = pixels_BHW[:, None].float() / 255
        ink_BCHW = F.relu(self.first(ink_BCHW))
        ink_BCHW = F.relu(self.second(ink_BCHW))
        return self.head(F.relu(self.hidden(ink_BCHW.flatten(1))))


app = Application(
    name="cnn",
    description="A small convolutional network with random weights.",
    input=TensorSpec(dtype="uint8", shape=(SIDE, SIDE), meaning="grey picture", units="0..255", name="image"),
    output=TensorSpec(dtype="float32", shape=(10,), meaning="score of each class", name="scores"),
    model=":CNN",
)
