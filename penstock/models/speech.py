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

    @property
    def flop_a_second(self) -> float:
        """FLOPs of the network's matrix products per second of sound."""
        each = 0.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                each += 2 * module.in_features * module.out_features
            elif isinstance(module, nn.Conv1d):
                each += 2 * module.in_channels * module.out_channels * module.kernel_size[0]
            elif isinstance(module, nn.GRU):
                each += 6 * module.hidden_size * (module.input_size + module.hidden_size)
        return 50 * each
