"""How many examples a second this machine reads, so that it can be set beside what a step takes."""

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from penstock.bench.results import Line, line_of
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec
from penstock.train.data import training_order
from penstock.train.examples import Examples
from penstock.train.feed import Batch, ReadFeed
from penstock.train.image_folder import ImageFolder
from penstock.train.shards import INDEX, Shards


def open_source(source: Path, size: tuple[int, int]) -> Examples:
    """The pictures or shards in a folder, parts by chance as for training.

    Args:
        source: A folder of shards, or of a folder of pictures for each class.
        size: Height and width of the parts in pixels.
    """
    if (source / INDEX).exists():
        return Shards(source, size=size, random=True)
    spec = TensorSpec(dtype="uint8", shape=(*size, 3), meaning="a picture")
    return ImageFolder(source, spec, random=True)


def rates(examples: Examples, *, workers: int, batch_size: int, batches: int, repeat: int) -> list[float]:
    """Examples a second by so many threads, nothing else running; one for each repetition.

    Args:
        examples: What is read.
        workers: Threads.
        batch_size: Examples of a batch.
        batches: Of a repetition.
        repeat: Repetitions; each goes on where the last one ended.

    Raises:
        BenchError: The first batch is not what one reader alone gives.
    """
    found: list[float] = []
    with ReadFeed(examples, training_order(0, len(examples), batch_size), workers=workers) as feed:
        _check_same(next(feed), examples, batch_size)
        for _ in range(repeat):
            started = time.perf_counter()
            for _ in islice(feed, batches):
                pass
            found.append(batches * batch_size / (time.perf_counter() - started))
    return found


def line_for(values: Sequence[float], source: Path, examples: Examples, workers: int, batch_size: int) -> Line:
    """A measurement as data."""
    kind = "shards" if isinstance(examples, Shards) else "pictures"
    shape = "x".join(map(str, examples.input_shape))
    return line_of(
        values,
        id=None,
        workload=f"{len(examples):,} examples of {kind} ({source.name}), random parts of {shape}, "
        f"batches of {batch_size}, {workers} threads",
        metric="examples read",
        unit="1/s",
    )


def _check_same(batch: Batch, examples: Examples, batch_size: int) -> None:
    with ReadFeed(examples, training_order(0, len(examples), batch_size)) as alone:
        expected = next(alone)
    if not all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True)):
        raise BenchError("the threads' first batch is not that of one reader; no rate is given.")
