"""An application whose inputs are prepared: pictures of any size, and three numbers of each."""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import Bundle
from tests.support.shared import made_once

MOST = 600
SIDE = 12

# A body of "crash" makes decode raise, one of "shape" gives another array than is declared, and "slow" takes a second.
PICTURES_PY = f"""
import time

import numpy as np
from penstock import Application, Prepare, RawSpec, TensorSpec
from penstock.core.decode import decode_image


# Here and not above, so that front-ends, which need no network, do not load torch.
def network():
    from torch import nn

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear({SIDE} * {SIDE} * 3, 3)

        def forward(self, pixels):
            return self.layer(pixels.float().flatten(1) / 255)

        def predict(self, pixels):
            return self(pixels).softmax(1)

    return Small()


def resize():
    from penstock.nn import SquareResize

    return SquareResize({SIDE})


def decode(body, content_type):
    if body == b"crash":
        raise RuntimeError("decode crashed")
    if body == b"shape":
        return np.zeros((2, 2, 3), np.uint8)
    if body.startswith(b"text"):
        body.decode()
    if body == b"slow":
        time.sleep(1)
        return np.full((9, 9, 4), 255, np.uint8)
    return decode_image(body, mode="RGBA", max_pixels={MOST} * {MOST})


app = Application(
    name="pictures",
    input=TensorSpec(dtype="float32", shape=({SIDE}, {SIDE}, 3), meaning="the middle square", units="0..255"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c"), name="scores"),
    model=":network",
    decode=decode,
    accepts=("image/png", "image/jpeg"),
    max_body_bytes=1 << 22,
    prepare=Prepare(
        module=":resize",
        raw=RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture, RGBA", max_shape=({MOST}, {MOST}, 4)),
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
    """Write the application as an app.py of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "app.py"
    # Another process may read the file at the same time.
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return find_application(str(file))


def pictures_bundle(folder: Path, text: str = PICTURES_PY) -> Bundle:
    """Write a bundle of it. The export of `prepare` takes seconds: see `shared_pictures`."""
    found = pictures_app(folder / "source", text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = found.model()
    return Bundle.write(found, network, RAWS, to=folder / "bundle")


def shared_pictures(factory: pytest.TempPathFactory) -> Bundle:
    """The bundle that all tests share."""
    return Bundle.open(made_once(factory, "pictures", pictures_bundle) / "bundle")
