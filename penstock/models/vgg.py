"""VGG with sixteen layers."""

from typing import final

from torch import Tensor, nn

from penstock.models.image_classifier import ImageNetwork, draw_convolutions

# B batch, C channels, H height, W width, K classes

SIDE = 224
LAST_SIDE = 7
# The output channels of each convolution, block by block; a pooling follows each block.
BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@final
class VGG16(ImageNetwork):
    """Simonyan and Zisserman 2015, "Very deep convolutional networks for large-scale image recognition", table 1, D.

    138,357,544 parameters for 1,000 classes. Pictures of 224 x 224.

    Args:
        classes: Outputs.
        dropout: Dropout probability after each of the two hidden layers.
    """

    def __init__(self, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for block in BLOCKS:
            for wide in block:
                features += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
                channels = wide
            # ReLU after the pooling has a quarter of the elements; parameters keep torchvision's names.
            features[-1:] = [nn.MaxPool2d(2), nn.ReLU()]
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            nn.Linear(channels * LAST_SIDE**2, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        # Without it a network this deep does not train.
        draw_convolutions(self)
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, 224, 224]`."""
        return self.classifier(self.features(image_BCHW).flatten(1))
