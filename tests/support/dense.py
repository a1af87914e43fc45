"""A small dense network: the darkness of each cell of four pixels, as a pack, an application and a function."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from penstock.core.packs.pack import Pack
from penstock.core.pictures.dense import Dense
from penstock.core.spec import Array, TensorSpec
from tests.support.packs import _model, _written

STRIDE, MARGIN, CELLS = 4, 2, 3
TILE = CELLS * STRIDE + 2 * MARGIN
DENSE = Dense(labels=("dark",), stride=STRIDE, margin=MARGIN, threshold=0.5, distance=6.0, empty_above=250)
TILE_SPEC = TensorSpec(name="tile", dtype="uint8", shape=(TILE, TILE, 3), meaning="a tile")
MAP_SPEC = TensorSpec(name="map", dtype="float32", shape=(CELLS, CELLS, 1), meaning="darkness of each cell")

APP_PY = """
from penstock import Application, Dense, TensorSpec


def network():
    # Here and not above, so that front-ends, which need no network, do not load torch.
    from torch import nn

    class Darkness(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.AvgPool2d(4)

        def forward(self, tile):
            pixels = tile[:, 2:-2, 2:-2].permute(0, 3, 1, 2).float()
            return 1 - self.pool(pixels).mean(1)[..., None] / 255

    return Darkness()


app = Application(
    name="darkness",
    input=TensorSpec(name="tile", dtype="uint8", shape=(16, 16, 3), meaning="a tile"),
    output=TensorSpec(name="map", dtype="float32", shape=(3, 3, 1), meaning="darkness of each cell"),
    dense=Dense(labels=("dark",), stride=4, margin=2, threshold=0.5, distance=6.0, empty_above=250),
    model=":network",
)
"""


def darkness(tiles_BTT3: Array) -> Array:
    """The maps of some tiles, as the networks compute them."""
    inside_BTT3 = tiles_BTT3[:, MARGIN:-MARGIN, MARGIN:-MARGIN].astype(np.float32)
    blocks = inside_BTT3.reshape(len(tiles_BTT3), CELLS, STRIDE, CELLS, STRIDE, 3)
    return 1 - blocks.mean((2, 4, 5))[..., None] / 255


def spotted(height: int, width: int, *spots: tuple[int, int]) -> Array:
    """A white picture with a black square of eight pixels around each place, x and y."""
    pixels_HW3 = np.full((height, width, 3), 255, np.uint8)
    for x, y in spots:
        pixels_HW3[max(y - 4, 0) : y + 4, max(x - 4, 0) : x + 4] = 0
    return pixels_HW3


def dense_pack(folder: Path) -> Pack:
    """Write a pack of this network."""
    nodes = [
        helper.make_node("Slice", ["tile", "low", "high", "axes"], ["inside"]),
        helper.make_node("Cast", ["inside"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["float"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("AveragePool", ["planes"], ["pooled"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("ReduceMean", ["pooled"], ["grey"], axes=[1], keepdims=0),
        helper.make_node("Div", ["grey", "white"], ["light"]),
        helper.make_node("Sub", ["one", "light"], ["dark"]),
        helper.make_node("Unsqueeze", ["dark", "last"], ["map"]),
    ]
    constants = {
        "low": np.array([MARGIN, MARGIN]),
        "high": np.array([TILE - MARGIN, TILE - MARGIN]),
        "axes": np.array([1, 2]),
        "white": np.array(255, np.float32),
        "one": np.array(1, np.float32),
        "last": np.array([3]),
    }
    example_TT3 = spotted(TILE, TILE, (8, 8))
    return _written(
        folder,
        _model(
            nodes,
            constants,
            {"tile": ("uint8", [1, TILE, TILE, 3])},
            {"map": ("float32", [1, CELLS, CELLS, 1])},
        ),
        {"inputs": example_TT3[None], "outputs": darkness(example_TT3[None])},
        name="darkness",
        kind="oneshot",
        inputs=(TILE_SPEC,),
        outputs=(MAP_SPEC,),
        recognition=None,
        dense=DENSE,
        live=None,
    )


def write_dense(folder: Path) -> Path:
    """Write the application and its bundle into a folder."""
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    (folder / "app.py").write_text(APP_PY)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), spotted(TILE, TILE, (8, 8))[None], to=folder / "bundle")
    return folder / "bundle"
