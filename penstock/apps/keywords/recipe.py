"""Training recipe of the keywords: CTC over signals of a few words, augmented at every step."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from penstock.apps.keywords.app import BLANK
from penstock.apps.keywords.clips import SIGNAL, Signals, compose, read_clips
from penstock.nn import ctc_loss
from penstock.train.recipe import ArraySet, Data, Recipe, Selection, StepExecution

# B batch, T samples, U frames, V symbols, L words or other symbols of a signal at most, K taps of a filter

PEAK_RATE = 6e-3
SIGNALS_PER_VOICE = {"train": 48, "validation": 32, "test": 32}
SEEDS = {"train": 1, "validation": 2, "test": 3}
# Training signals leave room at the end to be slowed down and shifted.
ROOM = round(0.8 * SIGNAL)
SLOWEST, FASTEST = 0.82, 1.2
TAPS = 4
FULL_SCALE = 32_767.0
# Assumed level of a signal without a word, for adding noise.
QUIETEST = 50.0


def recipe() -> Recipe:
    """AdamW with one cycle of the learning rate, over words at other speeds, loudnesses and in other noise."""
    return Recipe(
        data=keywords,
        loss=ctc_loss,
        optimizer=partial(AdamW, lr=PEAK_RATE, weight_decay=0.01),
        schedule=one_cycle,
        metrics={"word_error": word_error},
        selection=Selection(metric="word_error", mode="min", every_epochs=2.0),
        batch_size=16,
        epochs=18,
        augment=augment,
        execution=StepExecution(threads=1),
    )


def keywords() -> Data:
    """Training, validation and test signals, of different voices."""
    return Data(train=_signals("train"), validation=_signals("validation"), test=_signals("test"))


def _signals(split: str) -> ArraySet:
    signals = spoken_signals(split, SIGNALS_PER_VOICE[split])
    return ArraySet(inputs=signals.samples, targets=signals.symbols)


def spoken_signals(split: str, each: int) -> Signals:
    """Compose the signals of a split: those for training have room at the end, and no noise yet.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        each: Signals per voice.
    """
    training = split == "train"
    return compose(read_clips(split), each, seed=SEEDS[split], room=ROOM if training else SIGNAL, noisy=not training)


def word_error(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> float:
    """Word error rate: deletions, substitutions and insertions over the number of words."""
    heard_BU = log_probabilities_BUV.argmax(2).numpy()
    spoken_BL = symbols_BL.numpy()
    return error_rate(
        [collapsed(heard_U) for heard_U in heard_BU.tolist()],
        [[symbol for symbol in spoken_L if symbol != BLANK] for spoken_L in spoken_BL.tolist()],
    )


def error_rate(heard: Sequence[Sequence[object]], spoken: Sequence[Sequence[object]]) -> float:
    """Edit distances of all signals over the number of words that were spoken."""
    return sum(map(edit_distance, heard, spoken)) / max(1, sum(map(len, spoken)))


def collapsed(symbols_U: list[int]) -> list[int]:
    """Remove repeated symbols and blanks, as CTC defines it."""
    pairs = zip([BLANK, *symbols_U], symbols_U, strict=False)
    return [symbol for before, symbol in pairs if symbol not in (before, BLANK)]


def edit_distance(heard: Sequence[object], spoken: Sequence[object]) -> int:
    """Smallest number of insertions, deletions and substitutions (Levenshtein 1966)."""
    row = list(range(len(spoken) + 1))
    for wrong, one in enumerate(heard, 1):
        above, row = row, [wrong]
        for at, other in enumerate(spoken):
            row.append(min(above[at] + (one != other), above[at + 1] + 1, row[at] + 1))
    return row[-1]


def one_cycle(optimizer: Optimizer, steps: int) -> OneCycleLR:
    """Warm up to the peak rate over the first tenth of the steps, then decay by a cosine."""
    return OneCycleLR(optimizer, PEAK_RATE, total_steps=steps + 1, pct_start=0.1)


def augment(samples_BT: Tensor, symbols_BL: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Change the speed, position, frequency response, noise and level of each signal."""
    batch, frames = samples_BT.shape
    device = samples_BT.device

    # Drawn on the generator's device, so that the numbers are the same on every device.
    def sample(draw: Callable[..., Tensor], count: int = 1) -> Tensor:
        return draw(batch, count, generator=generator, device=generator.device)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * sample(torch.rand)

    sound_BT = _at_another_speed(samples_BT.float(), between(SLOWEST, FASTEST), between(0, 1))
    sound_BT = _filtered(sound_BT, (sample(torch.randn, TAPS) * between(0, 0.4)).to(device))
    noise_BT = sample(torch.rand, frames).to(device) - 0.5
    noise_BT = _filtered(noise_BT, sample(torch.randn, TAPS).to(device))
    level_B1, noise_B1 = _level(sound_BT).clamp(min=QUIETEST), _level(noise_BT)
    sound_BT.addcmul_(noise_BT, level_B1 / noise_B1 * 10 ** (-between(5, 45).to(device) / 20))
    peak_B1 = sound_BT.abs().amax(1, keepdim=True)
    return sound_BT.mul_(FULL_SCALE / peak_B1 * 10 ** (between(-40, 0).to(device) / 20)), symbols_BL


def _at_another_speed(sound_BT: Tensor, speed_B1: Tensor, later_B1: Tensor) -> Tensor:
    """Resample the words of each signal, and shift them by a share of the remaining room."""
    made_BT = torch.zeros_like(sound_BT)
    frames = sound_BT.shape[1]
    for sound_T, made_T, speed, later in zip(sound_BT, made_BT, speed_B1, later_B1, strict=True):
        words_T = functional.interpolate(sound_T[None, None, :ROOM], scale_factor=1 / speed.item(), mode="linear")[0, 0]
        start = int(later * (frames - len(words_T)))
        made_T[start : start + len(words_T)] = words_T
    return made_BT


def _level(sound_BT: Tensor) -> Tensor:
    """Root mean square, `[B, 1]`."""
    return torch.linalg.vector_norm(sound_BT, dim=1, keepdim=True) / sound_BT.shape[1] ** 0.5


def _filtered(sound_BT: Tensor, taps_BK: Tensor) -> Tensor:
    """Apply a causal FIR filter whose first tap is 1."""
    made_BT = sound_BT.clone()
    for back in range(1, taps_BK.shape[1] + 1):
        made_BT[:, back:].addcmul_(sound_BT[:, :-back], taps_BK[:, back - 1 : back])
    return made_BT
