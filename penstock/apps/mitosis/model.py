"""A network of convolutions without padding: it gives the same score to a cell wherever its tile begins."""

from typing import final

import torch
from torch import Tensor, nn

from penstock.apps.mitosis.app import LABELS

# B batch, T side of a tile, h, w cells of a map, K kinds

# Few cells are figures; with this bias, training begins with low scores.
RARE = -4.0


@final
class MitosisNet(nn.Module):
    """Strides of four and two, then four convolutions at a cell of eight pixels: 3,000 multiplications a pixel.

    The first convolution sees eight pixels at once, so that the many pixels are read once and not kept.

    Args:
        channels: After the first convolution.
        wide: Of the convolutions at the final stride.
    """

    shift: Tensor

    def __init__(self, channels: int = 32, wide: int = 64) -> None:
        super().__init__()
        layers = [
            *_convolution(3, channels, 8, 4),
            *_convolution(channels, channels),
            *_convolution(channels, wide, 3, 2),
        ]
        for _ in range(4):
            layers += _convolution(wide, wide)
        self.features = nn.Sequential(*layers)
        self.head = nn.Conv2d(wide, len(LABELS), 1)
        nn.init.constant_(self.head.bias, RARE)  # pyright: ignore[reportArgumentType]
        # Fitted after training, so that a score of one half is the best threshold of the validation set.
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, tile_BTT3: Tensor) -> Tensor:
        """Logits `[B, h, w, K]` of tiles in 0..255."""
        pixels_B3TT = tile_BTT3.permute(0, 3, 1, 2).to(self.head.weight.dtype)
        return self.head(self.features(pixels_B3TT / 128 - 1)).permute(0, 2, 3, 1)

    def predict(self, tile_BTT3: Tensor) -> Tensor:
        """Scores `[B, h, w, K]`."""
        return (self(tile_BTT3) + self.shift).sigmoid()


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, kernel, stride, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
