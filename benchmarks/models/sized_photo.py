"""A photograph that `decode` makes 224 x 224, and the mean of each colour: next to no network."""

import torch
from torch import nn

from penstock import Application, PictureFile, TensorSpec

SIDE = 224
MAX_SIDE = 4096
MEANS = TensorSpec(name="means", dtype="float32", shape=(3,), meaning="mean of red, green and blue", units="0..1")


class Means(nn.Module):
    """The mean of each colour, times a factor for each."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[:, ::16, ::16].float().mean((1, 2)) / 255 * self.factor


app = Application(
    name="sized-photo",
    input=TensorSpec(name="picture", dtype="uint8", shape=(SIDE, SIDE, 3), meaning="a photograph", units="0..255"),
    output=MEANS,
    model=Means,
    decode=PictureFile(mode="RGB", size=(SIDE, SIDE), max_pixels=MAX_SIDE * MAX_SIDE, at_least=(SIDE, SIDE)),
    accepts=("image/jpeg", "image/png"),
    max_body_bytes=1 << 24,
)
