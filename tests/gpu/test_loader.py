"""Batches on a GPU: read into page-locked memory and copied ahead, or resident; the same as on the CPU."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from penstock.train.data.loader import Batch, ReadingLoader
from penstock.train.data.resident import Resident, ResidentLoader, keep_on_device, make_loader
from penstock.train.data.sampler import BatchIndices, training_order
from tests.support.examples import Counted

pytestmark = pytest.mark.gpu

STEPS, COUNT, BATCH = 40, 500, 64


def order() -> Iterator[BatchIndices]:
    return islice(training_order(3, COUNT, BATCH), STEPS)


def examples() -> Counted:
    return Counted(COUNT, bad=(7, 300), varies=False)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_batches_are_those_of_the_cpu(workers: int) -> None:
    device = torch.device("cuda")
    plain = list(ReadingLoader(examples(), order(), on_bad="skip"))
    read = ReadingLoader(examples(), order(), workers=workers, on_bad="skip", device=device)
    resident = make_loader(Resident(examples(), device, 2), order(), workers=workers, on_bad="skip", device=device)
    assert isinstance(resident, ResidentLoader)
    for feed in (read, resident):
        with feed:
            for expected in plain:
                batch = next(feed)
                # Work that keeps the step's stream busy while the next batch is copied.
                busy = torch.randn(2048, 2048, device=device)
                for _ in range(5):
                    busy = busy @ busy
                check(batch, expected)
            with pytest.raises(StopIteration):
                next(feed)
    assert read.bad == resident.bad


def check(batch: Batch, expected: Batch) -> None:
    assert batch.inputs.is_cuda
    assert batch.targets.is_cuda
    assert torch.equal(batch.inputs.cpu(), expected.inputs)
    assert torch.equal(batch.targets.cpu(), expected.targets)


def test_a_small_set_stays_on_the_gpu() -> None:
    said: list[str] = []
    assert isinstance(keep_on_device(examples(), torch.device("cuda"), workers=2, notify=said.append), Resident)
    assert "stay on cuda" in said[0]
