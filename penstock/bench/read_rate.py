"""Examples a second that this machine reads and decodes."""

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from penstock.bench.measurement import Measurement, make_measurement
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec
from penstock.train.data.examples import Examples
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.loader import Batch, ReadingLoader
from penstock.train.data.sampler import training_order
from penstock.train.data.shard_file import INDEX
from penstock.train.data.shards import Shards
from penstock.train.data.trees import leaves


def open_source(source: Path, size: tuple[int, int]) -> Examples:
    """Open the pictures or shards in a folder, pictures with random crops as for training.

    Args:
        source: A folder of shards, or with a folder of pictures for each class.
        size: Height and width of the crops in pixels.
    """
    if (source / INDEX).exists():
        whole = Shards(source)
        return whole if whole.record is not None else Shards(source, size=size, random=True)
    spec = TensorSpec(dtype="uint8", shape=(*size, 3), meaning="a picture")
    return ImageFolder(source, spec, random=True)


def rates(examples: Examples, *, workers: int, batch_size: int, batches: int, repeat: int) -> list[float]:
    """Return the examples a second of each repetition.

    Args:
        examples: The examples.
        workers: Threads.
        batch_size: Examples of a batch.
        batches: Batches of a repetition.
        repeat: Repetitions; each continues where the last one ended.

    Raises:
        BenchError: The first batch differs from that of a single reader.
    """
    found: list[float] = []
    with ReadingLoader(examples, training_order(0, len(examples), batch_size), workers=workers) as feed:
        _check_same(next(feed), examples, batch_size)
        while not feed.is_warm:
            next(feed)
        for _ in range(repeat):
            started = time.perf_counter()
            for _ in islice(feed, batches):
                pass
            found.append(batches * batch_size / (time.perf_counter() - started))
    return found


def read_measurement(
    values: Sequence[float], source: Path, examples: Examples, workers: int, batch_size: int
) -> Measurement:
    """Describe the rates of one number of threads as a measurement."""
    kind = "shards" if isinstance(examples, Shards) else "pictures"
    shape = "x".join(map(str, examples.input_shape))
    what = f"random parts of {shape}" if examples.record is None else examples.describe()
    return make_measurement(
        values,
        id=None,
        workload=f"{len(examples):,} examples of {kind} ({source.name}), {what}, "
        f"batches of {batch_size}, {workers} threads",
        metric="examples read",
        unit="1/s",
    )


def _check_same(batch: Batch, examples: Examples, batch_size: int) -> None:
    with ReadingLoader(examples, training_order(0, len(examples), batch_size)) as alone:
        expected = next(alone)
    pairs = zip(leaves(tuple(batch)), leaves(tuple(expected)), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise BenchError("the threads' first batch differs from that of a single reader; no rate is given.")
