"""Changes of a spectrogram in training alone: masks over bands and frames, and another size of the speaker."""

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


@final
class FrequencyWarp(nn.Module):
    """Stretch or compress the bands of each signal, as if its speaker were smaller or larger, in training alone.

    Jaitly and Hinton 2013, "Vocal Tract Length Perturbation (VTLP) improves speech recognition": here on the bands of a
    log-mel spectrum, by linear interpolation. Bands beyond the last are the last.

    Args:
        most: Largest change, as a share.
    """

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def forward(self, spectrum_BTF: Tensor) -> Tensor:
        """`[B, T, F]` to the same shape."""
        if not self.training:
            return spectrum_BTF
        batch, frames, bands = spectrum_BTF.shape
        factor_B1 = 1 + self.most * (2 * torch.rand(batch, 1, device=spectrum_BTF.device) - 1)
        at_BF = (torch.arange(bands, device=spectrum_BTF.device) * factor_B1).clamp(max=bands - 1)
        below_BF = at_BF.floor().long().clamp(max=bands - 2)
        share_B1F = (at_BF - below_BF)[:, None, :]
        index_BTF = below_BF[:, None, :].expand(batch, frames, bands)
        return torch.lerp(spectrum_BTF.gather(2, index_BTF), spectrum_BTF.gather(2, index_BTF + 1), share_B1F)
