"""A bundle whose network does next to nothing, and rows of 784 bytes for it."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import Bundle
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.score.network import HowToRun, LoadedNetwork

BYTES, OUTPUTS = 784, 10


APP = """
import torch
from torch import nn
from penstock import Application, TensorSpec


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, pixels):
        return pixels[:, :10].float() + self.zero


app = Application(
    name="first",
    input=TensorSpec(dtype="uint8", shape=(784,), meaning="bytes", name="pixels"),
    output=TensorSpec(dtype="float32", shape=(10,), meaning="the first of them", name="first"),
    model=First,
)
"""


@lru_cache(maxsize=1)
def loaded_network(bundle: str, cache: str) -> LoadedNetwork:
    """Load a bundle once in a process."""
    return LoadedNetwork(Path(bundle), HowToRun(cache=Path(cache), device="cpu", threads=1))


def rows(count: int) -> Array:
    """`[count, 784]` random bytes."""
    return np.random.default_rng(0).integers(0, 256, (count, BYTES), np.uint8)


def write_bundle(folder: Path) -> Path:
    """Write the bundle, and its application beside it."""
    file = folder.with_name("app.py")
    file.write_text(APP)
    found = find_application(str(file))
    Bundle.write(found, found.model(), rows(4), to=folder)
    return folder


def as_column(array: Array) -> pa.Array:
    """Rows as fixed-size lists over their memory."""
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), BYTES)


def write_rows(file: Path, array: Array, row_group: int) -> None:
    """Write rows to a file of Parquet, neither compressed nor in dictionaries."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"pixels": as_column(array)})
    pq.write_table(table, file, row_group_size=row_group, use_dictionary=False, compression="none")
