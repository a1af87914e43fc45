"""Speech as it sounds elsewhere: other speeds, rooms, microphones, noise and telephones, on the device of a batch."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.apps.speech.app import RATE_HZ

# B batch, T samples, F frequencies, K points of a frequency response

FULL_SCALE = 32_767.0
# Longest reverberation, as an impulse response.
TAIL = 12_000
# Level of the tail below the direct sound, the time in which it falls by 60 dB, and the share of signals that have one.
TAIL_DB, TAIL_S, REVERBERANT = (-2.0, 22.0), (0.08, 0.7), 0.5
FALL_60_DB = 6.91
# Points of a response over the frequencies, evenly on a logarithmic scale, and their deviation in dB.
POINTS, LOWEST_HZ, RESPONSE_DB = 9, 60.0, 5.0
# Slope of the noise: 0 is white, -6 dB an octave is brown.
SLOPE_DB = -6.0, 1.0
TO_NOISE_DB = 6.0, 50.0
# Another signal of the batch in the background.
BABBLE, TO_BABBLE_DB = 0.15, (10.0, 30.0)
# A telephone: its bands, as the share of signals, and 8 bits on a logarithmic scale.
NARROW, HIGHEST_HZ = 0.3, (3_000.0, 7_500.0)
CUT_LOW, CUT_HZ = 0.4, (60.0, 350.0)
LOGARITHMIC, MU = 0.1, 255.0
PEAK_DB = -36.0, -0.5
# Numbers that a signal needs at most.
DRAWS = 40
# Assumed level of silence.
QUIETEST = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """An augment of signals: speed, reverberation, frequency response, noise, babble, telephones and level.

    The numbers of a signal are drawn from the generator, and noise from one on the device of the batch that is seeded
    by it: the same on every machine, but not the same on a CPU and a GPU.

    Args:
        room: Samples in which the utterances of a signal lie; the rest is room for slower ones.
        slowest: Smallest factor on the speed, at least `room` over the samples of a signal.
        fastest: Largest factor.
        plain: Share of the signals that get a new speed and level only, without a room or noise.
    """

    room: int
    slowest: float = 0.9
    fastest: float = 1.12
    plain: float = 0.0

    def __call__(self, samples_BT: Tensor, symbols_BL: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        """`[B, T]` samples to float samples of the same shape and scale."""
        draws = _Draws(len(samples_BT), samples_BT.device, generator)
        sound_BT = samples_BT.float() / FULL_SCALE
        sound_BT = self._at_another_speed(sound_BT, draws)
        plain_B1, plain_BT = draws.share(self.plain), sound_BT
        sound_BT = _heard_elsewhere(sound_BT, draws)
        sound_BT = sound_BT / sound_BT.abs().amax(1, keepdim=True).clamp(min=QUIETEST)
        coarse_B1 = draws.share(LOGARITHMIC)
        sound_BT = torch.where(coarse_B1, _in_8_bits(sound_BT), sound_BT)
        plain_BT = plain_BT / plain_BT.abs().amax(1, keepdim=True).clamp(min=QUIETEST)
        sound_BT = torch.where(plain_B1, plain_BT, sound_BT)
        return sound_BT * (FULL_SCALE * draws.decibels(*PEAK_DB)), symbols_BL

    def _at_another_speed(self, sound_BT: Tensor, draws: "_Draws") -> Tensor:
        """Resample each signal by linear interpolation, and shift it by a share of the remaining room."""
        frames = sound_BT.shape[1]
        speed_B1 = draws.between(self.slowest, self.fastest)
        later_B1 = draws.between(0.0, 1.0) * (frames - self.room / speed_B1).clamp(min=0)
        at_BT = (torch.arange(frames, device=sound_BT.device) - later_B1) * speed_B1
        inside_BT = (at_BT >= 0) & (at_BT < frames - 1)
        at_BT = at_BT.clamp(0, frames - 2)
        below_BT = at_BT.floor()
        share_BT = at_BT - below_BT
        index_BT = below_BT.long()
        made_BT = torch.lerp(sound_BT.gather(1, index_BT), sound_BT.gather(1, index_BT + 1), share_BT)
        return made_BT * inside_BT


class _Draws:
    """Numbers for the rows of a batch: one copy to the device, which more of them would wait for."""

    def __init__(self, batch: int, device: torch.device, generator: torch.Generator) -> None:
        self.batch, self.device = batch, device
        drawn = torch.rand(batch, DRAWS, generator=generator, device=generator.device)
        self._left = drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn.to(device)
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        self.noise = torch.Generator(device).manual_seed(seed)

    def between(self, low: float, high: float) -> Tensor:
        return low + (high - low) * self._next(1)

    def normal(self, count: int) -> Tensor:
        # Away from infinity.
        return torch.special.ndtri(self._next(count).clamp(1e-4, 1 - 1e-4))

    def share(self, share: float) -> Tensor:
        return self._next(1) < share

    def decibels(self, low: float, high: float) -> Tensor:
        """A factor, `[B, 1]`."""
        return 10 ** (self.between(low, high) / 20)

    def on_device(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise, device=self.device)

    def _next(self, count: int) -> Tensor:
        taken, self._left = self._left.split([count, self._left.shape[1] - count], 1)
        return taken


def _heard_elsewhere(sound_BT: Tensor, draws: _Draws) -> Tensor:
    """Add a room, babble, noise and a microphone: products of spectra."""
    batch, frames = sound_BT.shape
    count = frames + TAIL
    level_B1 = _level(sound_BT).clamp(min=QUIETEST)
    babble_B1 = draws.share(BABBLE) * level_B1 * draws.decibels(-TO_BABBLE_DB[1], -TO_BABBLE_DB[0])
    sound_BT = sound_BT + sound_BT.roll(1, 0) * (babble_B1 / level_B1.roll(1, 0))
    sound_BF = torch.fft.rfft(sound_BT, count) * torch.fft.rfft(_tails(draws), count)
    hz_F = torch.arange(sound_BF.shape[1], device=sound_BT.device) * (RATE_HZ / count)
    noise_BF = torch.complex(*(draws.on_device(batch, len(hz_F)) for _ in range(2)))
    noise_BF = noise_BF * (hz_F.clamp(min=LOWEST_HZ) / LOWEST_HZ) ** (draws.between(*SLOPE_DB) / 6.02)
    noise_BF = noise_BF * (_power(sound_BF) / _power(noise_BF)).sqrt() / draws.decibels(*TO_NOISE_DB)
    return torch.fft.irfft((sound_BF + noise_BF) * _responses(hz_F, draws), count)[:, :frames]


def _power(spectrum_BF: Tensor) -> Tensor:
    return (spectrum_BF.real.square() + spectrum_BF.imag.square()).sum(1, keepdim=True).clamp(min=1e-12)


def _level(sound_BT: Tensor) -> Tensor:
    """Root mean square, `[B, 1]`."""
    return torch.linalg.vector_norm(sound_BT, dim=1, keepdim=True) / sound_BT.shape[1] ** 0.5


def _tails(draws: _Draws) -> Tensor:
    """Impulse responses of rooms, `[B, TAIL]`: the direct sound, and noise that dies away."""
    at_s = torch.arange(TAIL, device=draws.device) / RATE_HZ
    falling_BT = torch.exp(-FALL_60_DB * at_s / draws.between(*TAIL_S)) * (at_s > draws.between(0.001, 0.01))
    tail_BT = draws.on_device(draws.batch, TAIL) * falling_BT
    size_B1 = torch.linalg.vector_norm(tail_BT, dim=1, keepdim=True).clamp(min=1e-6)
    tail_BT = tail_BT * (draws.share(REVERBERANT) * draws.decibels(-TAIL_DB[1], -TAIL_DB[0]) / size_B1)
    tail_BT[:, 0] = 1.0
    return tail_BT


def _responses(hz_F: Tensor, draws: _Draws) -> Tensor:
    """Frequency responses `[B, F]`: a few points in dB, and the bands of telephones."""
    place_F = torch.log2(hz_F.clamp(min=LOWEST_HZ) / LOWEST_HZ)
    place_F = place_F * ((POINTS - 1) / place_F[-1])
    below_F = place_F.floor().long().clamp(max=POINTS - 2)
    points_BK = draws.normal(POINTS) * draws.between(0.0, RESPONSE_DB)
    response_BF = torch.lerp(
        points_BK[:, below_F], points_BK[:, below_F + 1], (place_F - below_F).expand(draws.batch, -1)
    )
    made_BF = 10 ** (response_BF / 20)
    high_B1 = torch.where(draws.share(NARROW), draws.between(*HIGHEST_HZ), RATE_HZ)
    low_B1 = torch.where(draws.share(CUT_LOW), draws.between(*CUT_HZ), 1e-3)
    # Butterworth's, of order 8 and 4.
    made_BF = made_BF / (1 + (hz_F / high_B1) ** 16).sqrt()
    return made_BF / (1 + (low_B1 / hz_F.clamp(min=1.0)) ** 8).sqrt()


def _in_8_bits(sound_BT: Tensor) -> Tensor:
    """G.711's mu-law, of numbers from -1 to 1."""
    most = math.log1p(MU)
    coded_BT = (torch.log1p(MU * sound_BT.abs()) * (127 / most)).round() / 127
    return sound_BT.sign() * torch.expm1(coded_BT * most) / MU
