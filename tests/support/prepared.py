"""An application whose inputs are prepared: pictures of any size, and three numbers of each."""

from pathlib import Path

import numpy as np
import torch

from penstock.core.application import FoundApplication, find_application
from penstock.core.spec import Array
from penstock.runtime.bundle import Bundle

MOST = 600
SIDE = 12

PICTURES_PY = f"""
from functools import partial

from torch import nn

from penstock import Application, Prepare, RawSpec, TensorSpec
from penstock.core.decode import decode_image
from penstock.nn import SquareResize


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({SIDE} * {SIDE} * 3, 3)

    def forward(self, pixels):
        return self.layer(pixels.float().flatten(1) / 255)

    def predict(self, pixels):
        return self(pixels).softmax(1)


def decode(body, content_type):
    return decode_image(body, mode="RGBA", max_pixels={MOST} * {MOST})


app = Application(
    name="pictures",
    input=TensorSpec(dtype="float32", shape=({SIDE}, {SIDE}, 3), meaning="the middle square", units="0..255"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c"), name="scores"),
    model=Small,
    decode=decode,
    accepts=("image/png", "image/jpeg"),
    prepare=Prepare(
        module=partial(SquareResize, {SIDE}),
        raw=RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture, RGBA", most=({MOST}, {MOST}, 4)),
    ),
)
"""


def pictures(*sizes: tuple[int, int]) -> list[Array]:
    """Random pictures, RGBA and opaque."""
    chance = np.random.default_rng(0)
    found = [chance.integers(0, 256, (*size, 4), dtype=np.uint8) for size in sizes]
    for picture in found:
        picture[..., 3] = 255
    return found


RAWS = pictures((5, 4), (30, 40), (1, 9), (12, 12), (61, 33))


def pictures_app(folder: Path, text: str = PICTURES_PY) -> FoundApplication:
    """The application in an app.py of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "app.py").write_text(text)
    return find_application(str(folder / "app.py"))


def pictures_bundle(folder: Path, text: str = PICTURES_PY) -> Bundle:
    """A bundle of it; writing it takes seconds, so it is best made once."""
    found = pictures_app(folder / "source", text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = found.model()
    return Bundle.write(found, network, RAWS, to=folder / "bundle")
