"""A small network of inverted residuals, made for phones: ReLU6 alone, no squeeze-and-excitation."""

from typing import final

from torch import Tensor, nn

from penstock.models.images import EmbeddingNetwork

# B batch, C channels, H height, W width, E embedding, K classes

# Of each stage: by how much its blocks widen, the channels that leave it, its blocks, the stride of the first.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM = 32
# Channels are whole multiples of it, which vector units like.
MULTIPLE = 8


@final
class InvertedResidual(nn.Module):
    """Wide inside, narrow outside: Sandler et al. 2018, "MobileNetV2", figure 4d.

    Args:
        inputs: Channels that come.
        outputs: Channels that leave.
        expansion: How many times as many there are inside.
        stride: Of the 3 x 3 convolution, which is of each channel by itself.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inside = inputs * expansion
        layers: list[nn.Module] = [*_convolution(inputs, inside, 1)] if expansion != 1 else []
        layers += [*_convolution(inside, inside, 3, stride=stride, groups=inside)]
        # Linear: a rectifier would lose some of what few channels hold (section 3.2 there).
        layers += [nn.Conv2d(inside, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, outputs, H / stride, W / stride]`."""
        return x_BCHW + self.layers(x_BCHW) if self.adds else self.layers(x_BCHW)


@final
class MobileNet(EmbeddingNetwork):
    """Sandler et al. 2018, table 2, with a smaller last layer: half a million parameters at half its width.

    Pictures of any sides from 32; 96 to 224 is usual.

    Args:
        classes: Outputs.
        width: Of all channels, the share there is of that table's.
        embedding: Length of the feature vector.
        dropout: The share of the features that is left out in training.
    """

    def __init__(self, classes: int = 1000, *, width: float = 0.5, embedding: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        channels = _scaled(STEM, width)
        layers: list[nn.Module] = [*_convolution(3, channels, 3, stride=2)]
        for expansion, wide, blocks, stride in STAGES:
            outputs = _scaled(wide, width)
            for block in range(blocks):
                layers.append(InvertedResidual(channels, outputs, expansion, 1 if block else stride))
                channels = outputs
        layers += [*_convolution(channels, embedding, 1)]
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(embedding, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, H, W]`."""
        return self.fc(self.dropout(self.features(image_BCHW)))

    def features(self, image_BCHW: Tensor) -> Tensor:
        """The feature vector `[B, E]` that the last layer decides from, of prepared pictures."""
        return self.layers(image_BCHW).mean((2, 3))


def _convolution(inputs: int, outputs: int, side: int, *, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU6()


def _scaled(channels: int, width: float) -> int:
    return max(MULTIPLE, round(channels * width / MULTIPLE) * MULTIPLE)
