"""Pictures a second of a Hugging Face dataset of JPEG: `DatasetExamples` beside `datasets` with torch's DataLoader.

python -m benchmarks.feed_pictures [--pictures 2000] [--workers 1 --workers 2] [--repeat 3] [--record]

Crops of scikit-image's photographs of about 500 x 375 pixels, saved as JPEG into an Arrow table; random crops of 224 x
224, flipped half of the time. The peer decodes and resizes with Pillow in a `set_transform`, in processes. The runs
alternate.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, load_from_disk
from PIL import Image as Pictures
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.acceptance.report.results import record_result
from benchmarks.acceptance.train.photographs import HEIGHT, NAMES, WIDTH, photographs
from penstock.bench.measurement import Comparison, make_measurement
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec
from penstock.train.data.dataset_examples import DatasetExamples
from penstock.train.data.loader import ReadingLoader
from penstock.train.data.picture_reader import DRAWS, centre_box, random_box
from penstock.train.data.sampler import one_pass, training_order

SIDE = 224
BATCH, BATCHES = 64, 16
# JPEG decoded at half its size differs from one that is decoded whole and resized.
MAX_DIFFERENCE = 6.0
PICTURE = TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="a photograph")


def write_dataset(folder: Path, count: int) -> Dataset:
    """Write crops of photographs as JPEG, quality 90, into an Arrow table on disk."""
    rows: dict[str, list[Any]] = {"image": [], "label": []}
    for label, content in photographs(count):
        rows["image"].append({"bytes": content, "path": None})
        rows["label"].append(label)
    features = Features({"image": Image(), "label": ClassLabel(names=list(NAMES))})
    Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    made = load_from_disk(str(folder))
    assert isinstance(made, Dataset)
    return made


def random_crops(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Crop and flip decoded pictures at random: the transform of the peer."""
    found: list[torch.Tensor] = []
    for image in rows["image"]:
        box = random_box(image.width, image.height, 1.0, np.random.random(DRAWS).tolist())
        small = image.convert("RGB").resize((SIDE, SIDE), Pictures.Resampling.BILINEAR, box)
        if np.random.random() < 0.5:
            small = small.transpose(Pictures.Transpose.FLIP_LEFT_RIGHT)
        found.append(torch.from_numpy(np.array(small)))
    return {"image": found, "label": rows["label"]}


def ours(dataset: Dataset, workers: int) -> Iterator[Any]:
    """Yield batches of Penstock's reading threads."""
    examples = DatasetExamples(dataset, PICTURE, inputs="image", targets="label", random=True)
    with ReadingLoader(examples, training_order(0, len(examples), BATCH), workers=workers) as loader:
        while not loader.is_warm:
            next(loader)
        yield from loader


def peers(dataset: Dataset, workers: int) -> Iterator[Any]:
    """Yield batches of a DataLoader's processes, without end."""
    loader = DataLoader(
        dataset.with_transform(random_crops),  # pyright: ignore[reportArgumentType]
        BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader


def check(dataset: Dataset) -> None:
    """Compare centre crops with those of pictures that are decoded whole.

    Raises:
        BenchError: They differ.
    """
    examples = DatasetExamples(dataset, PICTURE, inputs="image", targets="label")
    batch = next(ReadingLoader(examples, one_pass(len(examples), 16), workers=2))
    for row, made in zip(dataset.select(range(16)), batch.inputs.numpy(), strict=True):
        box = centre_box(WIDTH, HEIGHT, 1.0, 0.875)
        whole = np.asarray(row["image"].resize((SIDE, SIDE), Pictures.Resampling.BILINEAR, box), np.float64)  # pyright: ignore
        difference = float(np.abs(whole - made).mean())
        if difference > MAX_DIFFERENCE:
            raise BenchError(f"a picture differs by {difference:.1f} levels from one decoded whole; no rate is given.")


def rates(make: Callable[[Dataset, int], Iterator[Any]], dataset: Dataset, workers: int) -> Iterator[float]:
    """Yield pictures a second, of the batches after the first ones; each continues where the last one ended."""
    batches = make(dataset, workers)
    for _ in islice(batches, 4):
        pass
    while True:
        started = time.perf_counter()
        for _ in islice(batches, BATCHES):
            pass
        yield BATCHES * BATCH / (time.perf_counter() - started)


def main() -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feed_pictures", description=__doc__)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--workers", type=int, action="append", help="1 and 2 by default")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="append the measurements to benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("workers", "Penstock", "datasets + DataLoader", "ratio")
    with TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), given.pictures)
        check(dataset)
        for workers in given.workers or (1, 2):
            # One after the other: the workers of both would share the cores.
            found = [(_one(ours, dataset, workers), _one(peers, dataset, workers)) for _ in range(given.repeat)]
            own, other = (np.median(each) for each in zip(*found, strict=True))
            table.add_row(str(workers), f"{own:,.0f}/s", f"{other:,.0f}/s", f"{own / other:.2f}")
            if given.record:
                record_result(_line([one for one, _ in found], float(other), given.pictures, workers), "training")
    Console().print(table)


def _one(make: Callable[[Dataset, int], Iterator[Any]], dataset: Dataset, workers: int) -> float:
    batches = rates(make, dataset, workers)
    try:
        return next(batches)
    finally:
        batches.close()  # pyright: ignore[reportAttributeAccessIssue]


def _line(values: list[float], other: float, pictures: int, workers: int) -> Any:
    return make_measurement(
        values,
        workload=f"{pictures:,} JPEG photographs of {WIDTH} x {HEIGHT} in a Hugging Face dataset, random crops "
        f"of {SIDE} x {SIDE}, batches of {BATCH}, {workers} reading threads; the peer {workers} processes",
        metric="pictures read",
        unit="1/s",
        command=f"python -m benchmarks.feed_pictures --pictures {pictures} --workers {workers}",
        peer=Comparison(
            name="datasets with Pillow, torch's DataLoader", median=other, ratio=float(np.median(values)) / other
        ),
    )


if __name__ == "__main__":
    main()
