"""Masks over bands and frames of a spectrogram, in training alone."""

from typing import final

import torch
from torch import Tensor, nn

# B batch, T frames, F bands


@final
class SpecAugment(nn.Module):
    """Set some bands and some stretches of frames to 0, their mean behind a normalization.

    Park et al. 2019, "SpecAugment", section 2, without time warping. In evaluation it does nothing.

    Args:
        bands: Most bands of a mask.
        frames: Most frames of a mask.
        masks: Masks of each kind.
    """

    def __init__(self, bands: int, frames: int, masks: int = 2) -> None:
        super().__init__()
        self.bands, self.frames, self.masks = bands, frames, masks

    def forward(self, spectrum_BTF: Tensor) -> Tensor:
        """`[B, T, F]` to the same shape."""
        if not self.training:
            return spectrum_BTF
        batch, frames, bands = spectrum_BTF.shape
        hidden_BTF = torch.zeros(batch, 1, 1, dtype=torch.bool, device=spectrum_BTF.device)
        for _ in range(self.masks):
            hidden_BTF = hidden_BTF | self._mask(batch, frames, self.frames, spectrum_BTF)[:, :, None]
            hidden_BTF = hidden_BTF | self._mask(batch, bands, self.bands, spectrum_BTF)[:, None, :]
        return spectrum_BTF.masked_fill(hidden_BTF, 0.0)

    @staticmethod
    def _mask(batch: int, size: int, most: int, like: Tensor) -> Tensor:
        """`[B, size]`, true for one stretch of each row of 0 to `most`."""
        width_B1, start_B1 = torch.rand(2, batch, 1, device=like.device)
        width_B1 = (width_B1 * (most + 1)).floor()
        start_B1 = (start_B1 * (size - width_B1 + 1)).floor()
        at = torch.arange(size, device=like.device)
        return (at >= start_B1) & (at < start_B1 + width_B1)
