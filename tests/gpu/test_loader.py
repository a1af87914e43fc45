"""Batches on a GPU: read into page-locked memory and copied ahead, or resident; the same as on the CPU."""

import time
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


def test_a_wait_of_the_host_is_no_wait_of_a_gpu_that_is_busy() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)

    def work() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    work()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    work_s = time.perf_counter() - began_s
    waits: dict[bool, float] = {}
    for works in (True, False):
        # Two pieces, each up to half of it: a batch takes half as long as the work of a step, and never longer than it.
        examples = Counted(512, slow_s=0.5 * work_s)
        with ReadingLoader(examples, training_order(0, 512, 16), workers=1, device=device) as feed:
            for _ in range(4):
                next(feed)
            torch.cuda.synchronize()
            before_s = feed.waited_s
            if works:
                work()
            for _ in range(8):
                next(feed)
                if works:
                    work()
            torch.cuda.synchronize()
            waits[works] = feed.waited_s - before_s
    # Of 8 batches one or two are read ahead.
    assert waits[False] > work_s
    # The host waits as long in both cases. A busy host reads later than it should, and the GPU may then wait a little.
    assert waits[True] < 0.4 * waits[False]
