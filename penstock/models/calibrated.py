"""An image classifier with calibrated probabilities and a feature vector."""

from typing import final

import torch
from torch import Tensor, nn

from penstock.models.image_classifier import EmbeddingNetwork

# B batch, H height, W width, E embedding, K classes


@final
class Calibrated(nn.Module):
    """An image network with temperature scaling: the softmax is computed of the logits over a temperature.

    Guo et al. 2017, "On calibration of modern neural networks", section 4.2. The temperature is not trained with the
    weights but fitted on held-out images, by `penstock.train.calibration.temperature_of`.

    Args:
        network: Computes the logits and the features.
    """

    temperature: Tensor

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Unscaled logits `[B, K]` of raw pixels `[B, H, W, 3]` in 0..255, of any dtype."""
        return self.network(pixels_BHWC)

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """Feature vector `[B, E]`, the input of the last layer."""
        return self.network.embed(pixels_BHWC)

    def predict(self, pixels_BHWC: Tensor) -> Tensor:
        """The probability of each class, `[B, K]`."""
        return (self(pixels_BHWC) / self.temperature).softmax(1)
