"""A small convolutional network for handwritten digits, including the preparation of raw pixels."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, H height, W width of the raw picture, S side of the prepared picture, C channels, E embedding

SIDE = 28
PREPARED_SIDE = 16
# The normalized half-side in standard deviations of the digit's ink.
SPREADS_SHOWN = 1.9
EMPTY = 1e-4


@final
class DigitNormalizer(nn.Module):
    """Normalize the polarity, position and size of a digit.

    A light border means black on white and is inverted. The ink's centre of mass goes to the middle and its spread (the
    root of its second moments) to a fixed size, as in LeCun et al. 1998, "Gradient-based learning applied to document
    recognition", section III.A, which centres by mass and scales to a box.
    """

    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Centre of each pixel, in affine_grid's coordinates.
        self.register_buffer("position", (2 * torch.arange(SIDE) + 1) / SIDE - 1, persistent=False)

    def forward(self, pixels_BHW: Tensor) -> Tensor:
        """`[B, 28, 28]` in 0..255 to `[B, 1, 16, 16]` in 0..1."""
        ink_BHW = pixels_BHW.float() / 255
        edges_BK = torch.cat([ink_BHW[:, 0], ink_BHW[:, -1], ink_BHW[:, :, 0], ink_BHW[:, :, -1]], 1)
        light_B = edges_BK.mean(1) > 0.5
        ink_BHW = torch.where(light_B[:, None, None], 1 - ink_BHW, ink_BHW)
        mass_B = ink_BHW.sum((1, 2)) + EMPTY
        x_B, x_variance_B = self._moments(ink_BHW.sum(1), mass_B)
        y_B, y_variance_B = self._moments(ink_BHW.sum(2), mass_B)
        scale_B = (SPREADS_SHOWN * (x_variance_B + y_variance_B).clamp_min(1e-3).sqrt()).clamp(0.15, 1.5)
        zero_B = torch.zeros_like(scale_B)
        row_x_B3 = torch.stack([scale_B, zero_B, x_B], 1)
        row_y_B3 = torch.stack([zero_B, scale_B, y_B], 1)
        affine_B23 = torch.stack([row_x_B3, row_y_B3], 1)
        size = [pixels_BHW.shape[0], 1, PREPARED_SIDE, PREPARED_SIDE]
        grid = F.affine_grid(affine_B23, size, align_corners=False)
        return F.grid_sample(ink_BHW[:, None], grid, align_corners=False)

    def _moments(self, profile_BK: Tensor, mass_B: Tensor) -> tuple[Tensor, Tensor]:
        mean_B = (profile_BK * self.position).sum(1) / mass_B
        square_B = (profile_BK * self.position.square()).sum(1) / mass_B
        return mean_B, (square_B - mean_B.square()).clamp_min(0)


@final
class DigitsNet(nn.Module):
    """Four convolutions, two poolings, an embedding of 128 numbers and ten classes: about 84,000 parameters."""

    def __init__(self, channels: int = 16, embedding: int = 128) -> None:
        super().__init__()
        wide = 2 * channels
        self.prepare = DigitNormalizer()
        self.features = nn.Sequential(
            *_convolution(1, channels),
            *_convolution(channels, channels),
            nn.MaxPool2d(2),
            *_convolution(channels, wide),
            *_convolution(wide, wide),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(wide * (PREPARED_SIDE // 4) ** 2, embedding),
            nn.ReLU(),
        )
        self.head = nn.Linear(embedding, 10)

    def forward(self, pixels_BHW: Tensor) -> Tensor:
        """Logits `[B, 10]` of raw pixels `[B, 28, 28]`."""
        return self.head(self.embed(pixels_BHW))

    def embed(self, pixels_BHW: Tensor) -> Tensor:
        """The feature vector `[B, 128]` before the last layer."""
        return self.features(self.prepare(pixels_BHW))

    def predict(self, pixels_BHW: Tensor) -> Tensor:
        """The probability of each digit, `[B, 10]`."""
        return self(pixels_BHW).softmax(1)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
