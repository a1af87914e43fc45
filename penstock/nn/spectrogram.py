"""Streaming log-mel spectrograms of raw samples; the overlap of the windows is state."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Self, final

import torch
from torch import Tensor

from penstock.core.errors import ApplicationError
from penstock.nn.windows import Windowed, Windows

# B batch, T samples in, U frames out, W samples of a window, F frequencies, D mel bands


@final
class LogMel(Windowed):
    """Logarithm of the energy in mel bands of successive windows.

    The first window begins with the first sample, and an incomplete window at the end is dropped, so a frame is ready
    as soon as its last sample has arrived. The transform is a matrix product with sines and cosines, which any runtime
    supports. It is computed in float32 at least, under autocast too.

    Davis and Mermelstein 1980, "Comparison of Parametric Representations"; the mel scale is that of O'Shaughnessy 1987,
    2595 log10(1 + f / 700), with triangles of height 1.

    Args:
        sample_rate_hz: Sample rate.
        window_ms: Length of a window.
        hop_ms: Time from the start of a window to the start of the next.
        bands: Features of a frame.
        low_hz: Lower edge of the lowest band.
        high_hz: Upper edge of the highest band; half the sample rate by default.
        full_scale: Divisor of the samples: 32,768 for 16-bit samples.
        floor: Added to the energy, so that the logarithm of silence is finite.

    Raises:
        ApplicationError: The hop is longer than the window, or the bands do not fit below half the sample rate.
    """

    cosines_WF: Tensor
    sines_WF: Tensor
    bands_FD: Tensor

    def __init__(
        self,
        sample_rate_hz: int = 16_000,
        *,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        bands: int = 40,
        low_hz: float = 20.0,
        high_hz: float | None = None,
        full_scale: float = 32_768.0,
        floor: float = 1e-6,
    ) -> None:
        window, hop = round(sample_rate_hz * window_ms / 1e3), round(sample_rate_hz * hop_ms / 1e3)
        high_hz = sample_rate_hz / 2 if high_hz is None else high_hz
        if not 0 <= low_hz < high_hz <= sample_rate_hz / 2 or bands < 1:
            raise ApplicationError(
                f"{bands} bands from {low_hz:g} to {high_hz:g} Hz; at {sample_rate_hz:,} samples a second they lie "
                f"between 0 and {sample_rate_hz / 2:g} Hz."
            )
        super().__init__(Windows(window, hop))
        self.full_scale = full_scale
        self.floor = floor
        # Its dtype and device are those of the output.
        self._output_like = torch.zeros(0)
        # Computed in float64 and rounded once.
        frequencies = window // 2 + 1
        at_W = torch.arange(window, dtype=torch.float64)
        hann_W = 0.5 - 0.5 * torch.cos(2 * math.pi * at_W / window)
        angle_WF = 2 * math.pi * at_W[:, None] * torch.arange(frequencies, dtype=torch.float64) / window
        bands_FD = _mel_bands(sample_rate_hz, window, bands, low_hz, high_hz)
        for name, made in (
            ("cosines_WF", hann_W[:, None] * torch.cos(angle_WF)),
            ("sines_WF", hann_W[:, None] * torch.sin(angle_WF)),
            ("bands_FD", bands_FD),
        ):
            self.register_buffer(name, made.to(self._output_like.dtype), persistent=False)

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T]` samples to `[B, U, bands]`."""
        return super().forward(whole_BT.to(self.bands_FD.dtype), length_B)

    def empty(self, batch: int) -> Tensor:
        """`[B]`."""
        return self.bands_FD.new_zeros(batch)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Half precision would lose quiet sounds next to loud ones: only the output is rounded.
        self._output_like = fn(self._output_like)
        precision = torch.promote_types(self._output_like.dtype, torch.float32)
        for name in ("cosines_WF", "sines_WF", "bands_FD"):
            setattr(self, name, getattr(self, name).to(self._output_like.device, precision))
        return self

    def over(self, frames_BM: Tensor) -> Tensor:
        """`[B, M]` samples to `[B, U, bands]`."""
        # An exported graph must not contain autocast, not even a disabled one.
        kind = frames_BM.device.type
        # The meta device has no autocast.
        casts = kind != "meta" and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            return self._energies(frames_BM)

    def _energies(self, samples_BM: Tensor) -> Tensor:
        # Contiguous, so that all windows are rows of one matrix product; a view would give one product per stream.
        windows_BUW = self.windows.each(samples_BM / self.full_scale).contiguous()
        energy_BUF = (windows_BUW @ self.cosines_WF).square() + (windows_BUW @ self.sines_WF).square()
        return torch.log(energy_BUF @ self.bands_FD + self.floor).to(self._output_like.dtype)


def _mel_bands(sample_rate_hz: int, window: int, bands: int, low_hz: float, high_hz: float) -> Tensor:
    def mel(hz: Tensor) -> Tensor:
        return 2595 * torch.log10(1 + hz / 700)

    edges = mel(torch.tensor([low_hz, high_hz], dtype=torch.float64))
    edges_E = torch.linspace(float(edges[0]), float(edges[1]), bands + 2, dtype=torch.float64)
    hz_F = torch.arange(window // 2 + 1, dtype=torch.float64) * sample_rate_hz / window
    at_F = mel(hz_F)[:, None]
    low_D, peak_D, high_D = edges_E[:-2], edges_E[1:-1], edges_E[2:]
    rising_FD, falling_FD = (at_F - low_D) / (peak_D - low_D), (high_D - at_F) / (high_D - peak_D)
    return torch.minimum(rising_FD, falling_FD).clamp(min=0)
