"""A small network of inverted residuals for phones: ReLU6 only, no squeeze-and-excitation."""

from typing import final

from torch import Tensor, nn

from penstock.models.image_classifier import EmbeddingNetwork, draw_convolutions

# B batch, C channels, H height, W width, E embedding, K classes

# Expansion, output channels, number of blocks, and stride of the first block of each stage.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM = 32
# Channel numbers are multiples of this, which suits vector units.
MULTIPLE = 8


@final
class InvertedResidual(nn.Module):
    """Wide inside, narrow outside: Sandler et al. 2018, "MobileNetV2", figure 4d.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        expansion: Ratio of inner to input channels.
        stride: Stride of the depthwise 3 x 3 convolution.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inside = inputs * expansion
        layers: list[nn.Module] = [*_convolution(inputs, inside, 1)] if expansion != 1 else []
        layers += [*_convolution(inside, inside, 3, stride=stride, groups=inside)]
        # Linear, because a ReLU on few channels loses information (section 3.2 there).
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
        width: Channels as a share of that table's.
        embedding: Length of the feature vector.
        dropout: Dropout probability of the features.
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
        draw_convolutions(self)

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, H, W]`."""
        return self.fc(self.dropout(self.features(image_BCHW)))

    def features(self, image_BCHW: Tensor) -> Tensor:
        """Feature vector `[B, E]` of prepared images, the input of the last layer."""
        return self.layers(image_BCHW).mean((2, 3))


def _convolution(inputs: int, outputs: int, side: int, *, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU6()


def _scaled(channels: int, width: float) -> int:
    return max(MULTIPLE, round(channels * width / MULTIPLE) * MULTIPLE)
