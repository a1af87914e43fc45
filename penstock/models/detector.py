"""A small detector without anchors: a heat map of the middle of each thing, and the sides of its box."""

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.models.image_classifier import draw_convolutions

# B batch, K classes, C channels, H height, W width

STRIDE = 4
# Channels and blocks of the stages at strides 4, 8, 16 and 32.
STAGES = ((24, 1), (48, 2), (96, 2), (128, 2))
JOINED = 48
# Score of every cell before training; most cells are empty (Lin et al. 2017, "Focal loss", section 4.1).
PRIOR_LOGIT = -3.0
# Standard deviation of the last layers' weights, so that their first outputs are the prior.
LAST_DEVIATION = 0.01


@final
class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = convolution(inputs, outputs, stride)
        self.two = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.short: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        short = x_BCHW if self.short is None else self.short(x_BCHW)
        return F.relu(self.two(self.one(x_BCHW)) + short)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A 3 x 3 convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def doubled(x_BCHW: Tensor) -> Tensor:
    """Twice the height and the width; unlike `interpolate`, it has a deterministic gradient on a GPU."""
    batch, channels, height, width = x_BCHW.shape
    wide = x_BCHW[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return wide.reshape(batch, channels, 2 * height, 2 * width)


@final
class CentreDetector(nn.Module):
    """Residual stages, joined from the coarsest to the finest, and two heads at a stride of 4 pixels.

    After Zhou et al. 2019, "Objects as points", with the sides of a box as in Tian et al. 2019, "FCOS".

    Args:
        classes: Classes of things.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        channels = STAGES[0][0]
        self.stem = convolution(3, channels, 2)
        stages: list[nn.Module] = []
        for wide, blocks in STAGES:
            layers = [_Residual(channels, wide, 2), *(_Residual(wide, wide, 1) for _ in range(blocks - 1))]
            stages.append(nn.Sequential(*layers))
            channels = wide
        self.stages = nn.ModuleList(stages)
        self.joins = nn.ModuleList(nn.Conv2d(wide, JOINED, 1) for wide, _ in STAGES)
        self.smooth = nn.ModuleList(convolution(JOINED, JOINED) for _ in STAGES[1:])
        self.head = convolution(JOINED, 64)
        self.heat = nn.Conv2d(64, classes, 1)
        self.sides = nn.Conv2d(64, 4, 1)
        draw_convolutions(self)
        for last, bias in ((self.heat, PRIOR_LOGIT), (self.sides, 0.0)):
            nn.init.normal_(last.weight, std=LAST_DEVIATION)
            assert last.bias is not None, last
            nn.init.constant_(last.bias, bias)

    def forward(self, picture: Tensor) -> dict[str, Tensor]:
        """Find things.

        Args:
            picture: `[B, 3, H, W]` in 0..255, of any dtype; sides that are multiples of 32.

        Returns:
            `heat`, logits `[B, K, H / 4, W / 4]`; and `sides`, logarithms `[B, 4, H / 4, W / 4]` of the distances to
            left, top, right and bottom, in cells.
        """
        x_BCHW = self.stem(picture.float() / 127.5 - 1)
        levels: list[Tensor] = []
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
            levels.append(x_BCHW)
        joined = self.joins[-1](levels[-1])
        for level, join, smooth in reversed(list(zip(levels[:-1], self.joins, self.smooth, strict=False))):
            joined = smooth(join(level) + doubled(joined))
        found = self.head(joined)
        return {"heat": self.heat(found), "sides": self.sides(found)}
