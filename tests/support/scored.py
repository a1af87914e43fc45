"""Inputs of `penstock score`, and what it wrote."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.spec import Array
from penstock.score.files import InputFolder, OutputFolder
from penstock.score.network import HowToRun, LoadedNetwork
from penstock.score.plan import ScoreOptions
from penstock.score.score_run import ScoreReport, score


def fixed_lists(array: Array) -> Any:
    """`[n, *shape]` as fixed-size lists, nested as the shape is."""
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def numbers(count: int, seed: int = 0) -> Array:
    """`[count, 4]` of whole numbers that the doubler of the tests takes without remarks, and doubles exactly."""
    return np.random.default_rng(seed).integers(20, 900, (count, 4)).astype(np.float32)


def write_parquet(file: Path, columns: dict[str, Any], rows: int = 100) -> Path:
    """Write columns to a file of row groups of so many rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=rows)
    return file


def write_numbers(folder: Path, counts: Sequence[int], rows: int = 100) -> Array:
    """Write a file of so many rows each, with a running `id`; returns all numbers in order."""
    arrays: list[Array] = []
    for at, count in enumerate(counts):
        arrays.append(numbers(count, seed=at))
        first = sum(counts[:at])
        ids = pa.array(range(first, first + count))
        write_parquet(folder / f"{at:03}.parquet", {"id": ids, "numbers": fixed_lists(arrays[-1])}, rows)
    return np.concatenate(arrays)


def how_to_run(cache: Path, **changes: Any) -> HowToRun:
    """By torch, which exports nothing."""
    fields: dict[str, Any] = {"executor": "torch", "device": "cpu", "batch": 16}
    return HowToRun(cache=cache, **(fields | changes))


def run(network: LoadedNetwork, source: object, to: object, how: HowToRun, **options: Any) -> ScoreReport:
    """Score with options; those of sizes go to the units."""
    sizes = {name: options.pop(name) for name in ("files_a_unit", "line_bytes_a_unit") if name in options}
    return score(network, InputFolder(str(source)), OutputFolder(str(to)), ScoreOptions(**options), how, **sizes)


def table_of(folder: Path) -> Any:
    """All parts, sorted by path and row."""
    parts = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    return pa.concat_tables(parts).sort_by([("path", "ascending"), ("row", "ascending")])


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
