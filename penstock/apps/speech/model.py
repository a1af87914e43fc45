"""Streaming recognisers of three sizes: spectrogram, two convolutions, recurrent layers, a lookahead, characters."""

from functools import partial

import torch
from torch import nn

from penstock.apps.speech.app import BLANK, LOOKAHEAD, RATE_HZ, SYMBOLS
from penstock.apps.speech.signal_frames import HOP_MS, STRIDE, WINDOW_MS
from penstock.apps.speech.spec_augment import FrequencyWarp, SpecAugment
from penstock.nn import GRU, CausalConv2d, LogMel, Lookahead, Residual, SequenceBatchNorm, Sequential, SplitFrames

BANDS = 40
# Most frames are blank; without this bias, the network takes long to learn that before the characters.
BLANK_BIAS = 2.0
# Most bands and frames of 10 ms of a mask.
MASKED_BANDS, MASKED_FRAMES = 5, 10


def speech_net(
    hidden: int,
    layers: int,
    channels: int = 32,
    dropout: float = 0.1,
    masks: int = 1,
    warp: float = 0.12,
    parts: int = 1,
    residual: bool = False,
    forward: int = 0,
) -> Sequential:
    """Int16 samples `[B, T]` to log-probabilities of the symbols every 20 ms, `[B, U, 29]`.

    After Amodei et al. 2015, "Deep Speech 2", section 3: two convolutions over time and frequency with strides,
    unidirectional recurrent layers, and the lookahead of its section 3.4 (Wang et al. 2016).

    Args:
        hidden: Units of a recurrent layer.
        layers: Recurrent layers.
        channels: Channels of the convolutions.
        dropout: Share of the inputs and outputs of the recurrent layers that a training step leaves out.
        masks: Masks over bands, and over frames, of each signal of a training step.
        warp: Largest change of a speaker's size in a training step, as a share.
        parts: Output frames of a frame of the recurrent layers: 1 or 2. Where the last frame of these is not whole, its
            outputs are left out.
        residual: Whether a recurrent layer behind the first adds to its input.
        forward: Units of a feed-forward block that follows each of these layers and adds to its input; 0 for none.
    """
    first = CausalConv2d(1, channels, (5, 11), (STRIDE, 2), bins=BANDS, bias=False)
    second = CausalConv2d(channels, channels, (1 + 2 * parts, 11), (parts, 2), bins=first.output_bins, bias=False)
    heard, middle = channels * second.output_bins, channels * first.output_bins
    head = nn.Linear(hidden, parts * len(SYMBOLS))
    with torch.no_grad():
        head.bias[BLANK :: len(SYMBOLS)] += BLANK_BIAS
    recurrent: list[nn.Module] = []
    for layer in range(layers):
        if not layer:
            recurrent.append(GRU(heard, hidden))
            continue
        # Laurent et al. 2016, as Deep Speech 2 between its layers.
        above = SequenceBatchNorm(hidden), GRU(hidden, hidden)
        recurrent += [Residual(*above)] if residual else above
        if forward:
            wide = nn.Linear(hidden, forward), nn.ReLU(), nn.Linear(forward, hidden)
            recurrent.append(Residual(SequenceBatchNorm(hidden), *wide))
    return Sequential(
        LogMel(RATE_HZ, window_ms=WINDOW_MS, hop_ms=HOP_MS, bands=BANDS),
        SequenceBatchNorm(BANDS),
        FrequencyWarp(warp),
        SpecAugment(MASKED_BANDS, MASKED_FRAMES, masks),
        nn.Unflatten(2, (1, BANDS)),
        first,
        nn.Flatten(2),
        SequenceBatchNorm(middle),
        nn.ReLU(),
        nn.Unflatten(2, (channels, first.output_bins)),
        second,
        nn.Flatten(2),
        SequenceBatchNorm(heard),
        nn.ReLU(),
        nn.Dropout(dropout),
        *recurrent,
        Lookahead(hidden, LOOKAHEAD // parts),
        SequenceBatchNorm(hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        head,
        *([SplitFrames(parts)] if parts > 1 else []),
        nn.LogSoftmax(-1),
    )


tiny = partial(speech_net, 192, 1, 8)
# Rooms, noise and many voices are enough: with dropout, masks and a larger warp it learned a third as fast, see
# decision 072.
middle = partial(speech_net, 512, 5, dropout=0.0, masks=0, warp=0.06, residual=True, forward=1024)
# Half as many steps of the recurrent layers take half the time.
large = partial(speech_net, 2560, 5, masks=2, parts=2, residual=True)
