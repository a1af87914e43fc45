"""A small streaming network for spoken words: two convolutions, a recurrent layer and a lookahead of 80 ms."""

import torch
from torch import nn

from penstock.apps.keywords.app import BLANK, LOOKAHEAD, RATE_HZ, SYMBOLS
from penstock.nn import GRU, CausalConv1d, LogMel, Lookahead, SequenceBatchNorm, Sequential

BANDS = 40
# Most frames are blank; without this bias, the network takes long to learn that before the words.
BLANK_BIAS = 3.0


def keywords_net(channels: int = 64, hidden: int = 128, dropout: float = 0.1) -> Sequential:
    """Int16 samples `[B, T]` to log-probabilities of the symbols every 40 ms, `[B, U, 21]`."""
    head = nn.Linear(hidden, len(SYMBOLS))
    with torch.no_grad():
        head.bias[BLANK] += BLANK_BIAS
    return Sequential(
        LogMel(RATE_HZ, window_ms=25, hop_ms=20, bands=BANDS),
        SequenceBatchNorm(BANDS),
        CausalConv1d(BANDS, channels, 5, bias=False),
        SequenceBatchNorm(channels),
        nn.ReLU(),
        CausalConv1d(channels, channels, 4, 2, bias=False),
        SequenceBatchNorm(channels),
        nn.ReLU(),
        nn.Dropout(dropout),
        GRU(channels, hidden),
        Lookahead(hidden, LOOKAHEAD),
        # Without it, the output of an untrained recurrent layer varies too little to train the head.
        SequenceBatchNorm(hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        head,
        nn.LogSoftmax(-1),
    )
