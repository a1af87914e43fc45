"""A classifier of photographs whose probabilities can be believed, and its feature vector."""

from typing import final

import torch
from torch import Tensor, nn

from penstock.models.images import EmbeddingNetwork

# B batch, H height, W width, E embedding, K classes


@final
class Calibrated(nn.Module):
    """Any network of photographs, and the one number that its logits are divided by before they are probabilities.

    Guo et al. 2017, "On calibration of modern neural networks", section 4.2. The number is not learned with the weights
    but fitted on held-out pictures, by `penstock.train.calibration.temperature_of`.

    Args:
        network: Gives the logits and the features.
    """

    temperature: Tensor

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Logits `[B, K]` of raw pixels `[B, H, W, 3]` in 0..255, of any dtype, as they are learned."""
        return self.network(pixels_BHWC)

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """The feature vector `[B, E]` that the last layer decides from."""
        return self.network.embed(pixels_BHWC)

    def predict(self, pixels_BHWC: Tensor) -> Tensor:
        """The probability of each class, `[B, K]`."""
        return (self(pixels_BHWC) / self.temperature).softmax(1)
