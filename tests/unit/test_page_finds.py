"""The finds of the server's page are those of `penstock.core.pictures.dense`."""

import json
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest

from penstock.core.pictures.dense import Cells, Dense
from penstock.device.dense_run import tile_runs

RUN = """
import { readFileSync } from "node:fs";
import { addCells, findsOf, isEmpty, tilesOf } from "./finds.mjs";
const { dense, maps, columns, tiles, size, tile, margin } = JSON.parse(readFileSync(0, "utf8"));
const cells = [];
for (const { map, left, top } of maps) addCells(cells, dense, map, columns, left, top);
const empty = tiles.map((pixels) => isEmpty(dense, pixels, [6, 6]));
console.log(JSON.stringify({ finds: findsOf(dense, cells), empty, places: tilesOf(...size, tile, margin) }));
"""


def run_in_node(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    node = which("node")
    if node is None:
        pytest.skip("there is no node here")
    source = Path(__file__).parents[2] / "penstock/serve/page/finds.js"
    (folder / "finds.mjs").write_text(source.read_text())
    (folder / "run.mjs").write_text(RUN)
    done = subprocess.run(
        [node, folder / "run.mjs"], input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("distance", [0.0, 5.0, 30.0])
def test_a_browser_merges_the_same_finds(tmp_path: Path, distance: float) -> None:
    dense = Dense(labels=("a", "b"), stride=4, margin=2, threshold=0.6, distance=distance, empty_above=200)
    rng = np.random.default_rng(3)
    # Few different scores, so that some are equal.
    maps = {(left, top): rng.integers(0, 10, (5, 7, 2)) / 10 for top in (0, 20) for left in (0, 28, 56)}
    expected = dense.finds([dense.cells_above(each, left, top) for (left, top), each in maps.items()])
    assert expected
    dark, bright, spot = (np.full((6, 6, 3), value, np.uint8) for value in (10, 200, 200))
    spot[4, 4, 2] = 199
    given = {
        "dense": dense.to_json(),
        "maps": [{"map": each.ravel().tolist(), "left": left, "top": top} for (left, top), each in maps.items()],
        "columns": 7,
        "tiles": [each.ravel().tolist() for each in (dark, bright, spot)],
        "size": [50, 33],
        "tile": [16, 24],
        "margin": 2,
    }
    found = run_in_node(tmp_path, given)
    rows = [(each["label"], each["score"], each["x"], each["y"]) for each in found["finds"]]
    assert [row[0] for row in rows] == [each.label for each in expected]
    numbers = [(each.score, each.x, each.y) for each in expected]
    np.testing.assert_allclose([row[1:] for row in rows], numbers, rtol=1e-12)
    assert found["empty"] == [dense.is_empty(each) for each in (dark, bright, spot)] == [False, True, False]
    places = [(run.left, run.top) for run in tile_runs(50, 33, (12, 20), 1)]
    assert [(each["left"], each["top"]) for each in found["places"]] == places


def test_all_cells_of_a_large_map_are_taken(tmp_path: Path) -> None:
    dense = Dense(labels=("a",), stride=4, margin=0, threshold=0.5, distance=1e4)
    given = {
        "dense": dense.to_json(),
        "maps": [{"map": [1] * (512 * 512), "left": 0, "top": 0}],
        "columns": 512,
        "tiles": [],
        "size": [4, 4],
        "tile": [4, 4],
        "margin": 0,
    }
    (found,) = run_in_node(tmp_path, given)["finds"]
    assert (found["x"], found["y"]) == (1024, 1024)


def test_no_cells_are_no_finds(tmp_path: Path) -> None:
    dense = Dense(labels=("a",), stride=4, margin=0, distance=5.0)
    assert dense.finds([Cells.joined([])]) == []
    given = {
        "dense": dense.to_json(),
        "maps": [],
        "columns": 1,
        "tiles": [],
        "size": [1, 1],
        "tile": [4, 4],
        "margin": 0,
    }
    assert run_in_node(tmp_path, given) == {"finds": [], "empty": [], "places": [{"left": 0, "top": 0}]}
