"""A residual network of fifty layers."""

from typing import cast, final

from torch import Tensor, nn

from penstock.models.image_classifier import EmbeddingNetwork, draw_convolutions
from penstock.nn.entry import EntryConv2d
from penstock.nn.pooling import MaxPool2d

# B batch, C channels, H height, W width, E embedding, K classes

# Blocks of each stage; every stage halves the sides and doubles the channels.
STAGES = (3, 4, 6, 3)
EXPANSION = 4


@final
class Bottleneck(nn.Module):
    """He et al. 2016, "Deep residual learning for image recognition", figure 5, right.

    Args:
        inputs: Input channels.
        width: Channels of the 3 x 3 convolution; the block has four times as many outputs.
        stride: Stride of the 3 x 3 convolution ("version 1.5"). In the paper the first 1 x 1 convolution strides, which
            discards three quarters of its input.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 width, H / stride, W / stride]`."""
        short_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        x_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        x_BCHW = self.relu(self.bn2(self.conv2(x_BCHW)))
        return self.relu(self.bn3(self.conv3(x_BCHW)) + short_BCHW)


@final
class ResNet50(EmbeddingNetwork):
    """He et al. 2016, table 1, 50 layers, version 1.5: 25,557,032 parameters for 1,000 classes.

    Pictures of 224 x 224, or of any sides from 32.

    Args:
        classes: Outputs.
        zero_last_gamma: Initialise each block as the identity, for large batches: Goyal et al. 2017, "Accurate, large
            minibatch SGD", section 5.1.
    """

    def __init__(self, classes: int = 1000, *, zero_last_gamma: bool = False) -> None:
        super().__init__()
        self.conv1 = EntryConv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = MaxPool2d(3, 2, 1)
        channels = 64
        for stage, blocks in enumerate(STAGES):
            width = 64 << stage
            layers: list[nn.Module] = []
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = EXPANSION * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(channels, classes)
        draw_convolutions(self)
        for module in self.modules() if zero_last_gamma else ():
            if isinstance(module, Bottleneck):
                nn.init.zeros_(cast(Tensor, module.bn3.weight))

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, H, W]`."""
        return self.fc(self.features(image_BCHW))

    def features(self, image_BCHW: Tensor) -> Tensor:
        """Feature vector `[B, 2048]` of prepared images, the input of the last layer."""
        x_BCHW = self.relu(self.maxpool(self.bn1(self.conv1(image_BCHW))))
        for stage in range(len(STAGES)):
            x_BCHW = self.get_submodule(f"layer{stage + 1}")(x_BCHW)
        return x_BCHW.mean((2, 3))
