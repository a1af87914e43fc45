"""Mitotic figures in tissue stained with hematoxylin and eosin, at 0.25 um a pixel."""

from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.pictures.dense import Dense
from penstock.core.spec import Array, TensorSpec

# h, w cells of a map, K kinds

STRIDE = 8
# The receptive field is 88 pixels: 40 on each side of a cell of 8.
MARGIN = 40
CELLS = 64
TILE = CELLS * STRIDE + 2 * MARGIN
LABELS = ("mitosis",)
PIXEL_UM = 0.25
# 7.5 um: the distance within which a find is the annotated figure.
MATCH_PX = 30

DENSE = Dense(
    labels=LABELS,
    stride=STRIDE,
    margin=MARGIN,
    threshold=0.5,
    distance=MATCH_PX,
    pixel_um=PIXEL_UM,
    # A figure has darker pixels in every stain.
    empty_above=200,
)


def decode(body: bytes, content_type: str) -> Array:
    """Decode a PNG or JPEG of the size of one tile, uint8 `[592, 592, 3]`."""
    return decode_image(body, mode="RGB", max_pixels=TILE * TILE)


def reply(map_hwK: Array) -> dict[str, Any]:
    """The finds of one tile in its pixels, from `[h, w, K]`."""
    return {"finds": [find.to_json() for find in DENSE.finds([DENSE.cells_above(map_hwK, MARGIN, MARGIN)])]}


app = Application(
    name="mitosis",
    description="Finds mitotic figures in tissue stained with hematoxylin and eosin.",
    input=TensorSpec(
        name="tile",
        dtype="uint8",
        shape=(TILE, TILE, 3),
        meaning="a tile of a slide at 0.25 um a pixel: red, green, blue; its outer 40 pixels are context only",
        units="0..255",
    ),
    output=TensorSpec(
        name="map",
        dtype="float32",
        shape=(CELLS, CELLS, len(LABELS)),
        meaning="score of a mitotic figure in each cell of 8 pixels",
        units="probability",
    ),
    dense=DENSE,
    decode=decode,
    reply=reply,
    accepts=("image/png", "image/jpeg"),
    model="penstock.apps.mitosis.model:MitosisNet",
    recipe="penstock.apps.mitosis.recipe:recipe",
)
