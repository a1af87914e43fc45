"""A recurrent network over live sound: spectrogram, two convolutions, gated recurrent layers, scores of characters."""

from typing import final

from torch import nn

from penstock.nn import GRU, CausalConv1d, LogMel, Sequential

CONVOLVED = 640


@final
class SpeechNet(Sequential):
    """After Amodei et al. 2016, "Deep Speech 2", section 3, its convolutions over time alone and causal.

    One output for every 20 ms of sound: the logarithm of each symbol's probability.

    Args:
        hidden: Units of a recurrent layer.
        layers: Recurrent layers.
        symbols: Scores of an output, the blank of CTC among them.
        rate_hz: Samples of the sound a second.
        bands: Of the spectrogram.
        convolved: Channels of the second convolution; of the first half as many.
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
        """Multiplications and additions that a second of sound takes in the products of the network."""
        each = 0.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                each += 2 * module.in_features * module.out_features
            elif isinstance(module, nn.Conv1d):
                each += 2 * module.in_channels * module.out_channels * module.kernel_size[0]
            elif isinstance(module, nn.GRU):
                each += 6 * module.hidden_size * (module.input_size + module.hidden_size)
        return 50 * each
