"""Frames of a signal: those of the network in a number of samples, and those that a text needs at least."""

import torch
from torch import Tensor

from penstock.apps.speech.app import BLANK, RATE_HZ
from penstock.nn.ctc import doubled

# B signals, L characters of a signal at most

# Of the spectrogram.
WINDOW_MS, HOP_MS = 25, 10
WINDOW, HOP = RATE_HZ * WINDOW_MS // 1000, RATE_HZ * HOP_MS // 1000
# Frames of the spectrogram in an output frame.
STRIDE = 2


def spectrogram_frames(samples_B: Tensor) -> Tensor:
    """Count the frames of the spectrogram of so many samples, `[B]`."""
    return ((samples_B - WINDOW) // HOP + 1).clamp(min=0)


def output_frames(samples_B: Tensor) -> Tensor:
    """Count the output frames of the network for so many samples, `[B]`."""
    return spectrogram_frames(samples_B) // STRIDE


def needed_frames(symbols_BL: Tensor) -> Tensor:
    """Count the output frames in which CTC can write each text, `[B]`: a blank lies between equal characters.

    Args:
        symbols_BL: The characters, padded with blanks.
    """
    return torch.clamp((symbols_BL != BLANK).sum(1) + doubled(symbols_BL), min=1)
