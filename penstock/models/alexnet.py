"""AlexNet with one tower."""

from typing import final

from torch import Tensor, nn

from penstock.models.image_classifier import ImageNetwork
from penstock.nn.entry import EntryConv2d
from penstock.nn.pooling import MaxPool2d

# B batch, C channels, H height, W width, K classes

SIDE = 224
LAST_SIDE = 6


@final
class AlexNet(ImageNetwork):
    """Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": the network of section 5.

    One tower of five convolutions, which hold 4% of the 61,100,840 parameters and 92% of the arithmetic, and three
    fully connected layers, which hold the rest. Pictures of 224 x 224.

    Args:
        classes: Outputs.
        dropout: Dropout probability before each of the two hidden layers.
    """

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            EntryConv2d(3, 64, 11, stride=4, padding=2),
            MaxPool2d(3, 2),
            nn.ReLU(),
            nn.Conv2d(64, 192, 5, padding=2),
            MaxPool2d(3, 2),
            nn.ReLU(),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            MaxPool2d(3, 2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * LAST_SIDE**2, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, 224, 224]`."""
        return self.classifier(self.features(image_BCHW).flatten(1))
