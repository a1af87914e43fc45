"""The map of a picture is the same whole and in tiles, wherever their borders are."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apps.mitosis.app import DENSE, MARGIN, STRIDE
from penstock.apps.mitosis.model import MitosisNet
from penstock.core.pictures.dense import Find
from penstock.core.spec import Array, TensorSpec
from penstock.device.dense_run import DenseRun
from penstock.device.slides import ArraySlide

# Every cell is a find of its own.
EVERY_CELL = replace(DENSE, threshold=1e-12, distance=0.0, empty_above=None)


def made() -> MitosisNet:
    torch.manual_seed(0)
    net = MitosisNet(channels=4, wide=4).eval()
    with torch.no_grad():
        # Activations that do not fade from layer to layer, so that scores differ.
        for parameter in net.parameters():
            parameter.mul_(2.5 if parameter.ndim > 1 else 1)
    return net


NETWORK = made()


@torch.no_grad()
def predict(tiles_BTT3: Array) -> Array:
    return NETWORK.predict(torch.from_numpy(tiles_BTT3)).numpy()


def by_place(finds: list[Find]) -> Array:
    table = np.array([(find.y, find.x, find.score) for find in finds])
    return table[np.lexsort((table[:, 1], table[:, 0]))]


@settings(max_examples=12, deadline=None)
@given(
    height=st.integers(5, 130),
    width=st.integers(5, 150),
    cells=st.sampled_from([1, 3, 8]),
    count=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_tiles_give_the_map_of_the_whole_picture(height: int, width: int, cells: int, count: int, seed: int) -> None:
    # Blocks, because the network averages single pixels away.
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3)).astype(np.uint8)
    slide = ArraySlide(blocks.repeat(16, 0).repeat(16, 1)[:height, :width])
    side = cells * STRIDE + 2 * MARGIN
    tile = TensorSpec(name="tile", dtype="uint8", shape=(side, side, 3), meaning="a tile")
    found = DenseRun(dense=EVERY_CELL, tile=tile, predict=predict, run_tiles=count, threads=2).over(slide)
    # Whole, with the margin around it.
    down, across = (-(-size // STRIDE) * STRIDE + 2 * MARGIN for size in (height, width))
    (map_hwK,) = predict(slide.read(-MARGIN, -MARGIN, across, down)[None])
    inside = map_hwK[: (height + 3) // STRIDE, : (width + 3) // STRIDE]
    assert len(found.finds) == inside.size
    assert np.ptp(inside) > 1e-3 or inside.size < 20
    whole = by_place(EVERY_CELL.finds([EVERY_CELL.cells_above(inside)]))
    np.testing.assert_allclose(by_place(found.finds), whole, rtol=0, atol=1e-5)
