"""Base classes of image classifiers: raw pixels in, logits out."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

# B batch, H height, W width, C channels, E embedding, K classes

# Statistics of ImageNet's training images, on the scale of 0 to 1; published weights expect them.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


def draw_convolutions(network: nn.Module) -> None:
    """Initialise all convolutions: He et al. 2015, "Delving deep into rectifiers", section 2.2."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Pixels(nn.Module):
    """Normalise raw pixels and put the channels first. It adds nothing to the state dict."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN) * 255, persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION) * 255, persistent=False)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """`[B, H, W, 3]` in 0..255, of any dtype, to float32 `[B, 3, H, W]` in channels-last memory format."""
        return ((pixels_BHWC.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


class ImageNetwork(nn.Module, ABC):
    """An image classifier. Its parameters have torchvision's names, so that published weights can be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare = Pixels()

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Logits `[B, K]` of raw pixels `[B, H, W, 3]` in 0..255."""
        return self.logits(self.prepare(pixels_BHWC))

    def predict(self, pixels_BHWC: Tensor) -> Tensor:
        """The probability of each class, `[B, K]`."""
        return self(pixels_BHWC).softmax(1)

    @abstractmethod
    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, H, W]`."""


class EmbeddingNetwork(ImageNetwork, ABC):
    """An image classifier that also computes a feature vector, the input of its last layer."""

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """The feature vector `[B, E]` of raw pixels `[B, H, W, 3]` in 0..255."""
        return self.features(self.prepare(pixels_BHWC))

    @abstractmethod
    def features(self, image_BCHW: Tensor) -> Tensor:
        """The feature vector `[B, E]` of prepared pictures, `[B, 3, H, W]`."""
