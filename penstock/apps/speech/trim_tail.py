"""Trimmed tails in training, so that a network writes characters earlier; and other changes of the signals before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.apps.speech.signal_frames import HOP, HOP_MS, STRIDE, needed_frames, spectrogram_frames
from penstock.core.errors import TrainError
from penstock.train.data.augment import Augment, on_tensors

# B batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimTail:
    """Cut a random number of frames from the end of each signal, while its text stays whole.

    Song et al. 2022, "TrimTail: Low-Latency Streaming ASR with Simple but Effective Spectrogram-Level Length Penalty",
    arXiv 2211.00522, section 2: the loss ends with the signal, so that each character must come earlier. As a frame of
    the spectrogram is a hop of samples, the samples are cut. Signals of one length, whose ends are not known, stay as
    they are.

    Args:
        max_ms: The longest cut, in milliseconds; 0 for none. A signal is not cut by half or more, nor if its text would
            have too few frames.
        before: Another change, of the samples `[B, T]` and the characters `[B, L]`, that comes before; None for none.

    Raises:
        TrainError: The cut is negative.
    """

    max_ms: float = 200.0
    before: Augment | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_ms < float("inf"):
            raise TrainError(f"the trimmed tail has max_ms {self.max_ms}; it must be 0, for none, or more.")

    def __call__(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Change a batch; see `penstock.train.recipe.Recipe.augment`."""
        knows_lengths = isinstance(targets, Mapping)
        if self.before is not None:
            change = on_tensors(self.before, input="sound", target="symbols") if knows_lengths else self.before
            inputs, targets = change(inputs, targets, generator)
        if not (knows_lengths and self.max_ms):
            return inputs, targets
        samples_B = targets["samples"]
        frames_B = spectrogram_frames(samples_B)
        drawn_B = torch.rand(len(samples_B), generator=generator, device=generator.device).to(samples_B.device)
        cut_B = (drawn_B * (self.max_ms // HOP_MS + 1)).long()
        fits_B = (2 * cut_B < frames_B) & (frames_B - cut_B >= STRIDE * needed_frames(targets["symbols"]))
        samples_B = samples_B - HOP * cut_B * fits_B
        return {**inputs, "length_B": samples_B}, {**targets, "samples": samples_B}
