"""A streaming speech network: spectrogram, two convolutions, GRU layers, log-probabilities of characters."""

from typing import final

from torch import nn

from penstock.nn import GRU, CausalConv1d, LogMel, Sequential

CONVOLVED = 640


@final
class SpeechNet(Sequential):
    """After Amodei et al. 2016, "Deep Speech 2", section 3, with causal convolutions over time alone.

    One output per 20 ms of sound: the log-probabilities of the symbols.

    Args:
        hidden: Units of a recurrent layer.
        layers: Recurrent layers.
        symbols: Symbols of an output, including CTC's blank.
        rate_hz: Sample rate.
        bands: Bands of the spectrogram.
        convolved: Channels of the second convolution; the first has half as many.
    """

    def __init__(
        self,
        *,
        hidden: int = 2560,
        layers: int = 5,
        symbols: int = 32,
        rate_hz: int = 16_000,
        bands: int = 80,
        convolved: int = CONVOLVED,
    ) -> None:
        super().__init__(
            LogMel(rate_hz, bands=bands),
            CausalConv1d(bands, convolved // 2, 5, 2),
            nn.ReLU(),
            CausalConv1d(convolved // 2, convolved, 3),
            nn.ReLU(),
            *(GRU(hidden if layer else convolved, hidden) for layer in range(layers)),
            nn.Linear(hidden, symbols),
            nn.LogSoftmax(-1),
        )
