"""Processes that read for the threads of a loader: the same batches and errors, also when one is killed."""

import os
import signal
import time
from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import TensorSpec
from penstock.train.data import reader_processes
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.loader import Batch, Loader, ReadingLoader
from penstock.train.data.reader_processes import LEAST_WORKERS, ReaderProcesses
from penstock.train.data.sampler import training_order
from tests.support.examples import Counted

COUNT, BATCH = 24, 16
SPEC = TensorSpec(dtype="uint8", shape=(12, 16, 3), meaning="a picture")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        file = tmp_path / "pictures" / f"class {number % 3}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file)
    return tmp_path / "pictures"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_processes, "START_S", 0.0)


def processes_of(feed: Loader) -> ReaderProcesses:
    assert isinstance(feed, ReadingLoader)
    assert feed._processes is not None
    return feed._processes


def started(feed: Loader) -> int:
    """Take batches until all processes are ready; return how many."""
    taken, deadline_s = 0, time.monotonic() + 60
    while not feed.is_warm:
        next(feed)
        taken += 1
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    # A thread may use one at this moment.
    assert len(processes_of(feed)._started) == LEAST_WORKERS
    return taken


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


@pytest.mark.usefixtures("at_once")
def test_processes_read_what_threads_read_and_leave_with_the_loader(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = ImageFolder(folder, SPEC, random=True)
    with ReadingLoader(examples, training_order(1, COUNT, BATCH), workers=LEAST_WORKERS) as feed:
        # Threads may still read pieces that were submitted before; after them, only processes read.
        taken = started(feed) + len(list(islice(feed, 2 * LEAST_WORKERS)))
        monkeypatch.setattr(ImageFolder, "read", None)
        got = list(islice(feed, 4))
        pids = [process._process.pid for process in processes_of(feed)._started]
        assert feed.reading.examples > 0
        assert feed.reading.cpu_s > 0
    monkeypatch.undo()
    alone = islice(ReadingLoader(examples, training_order(1, COUNT, BATCH)), taken, taken + 4)
    assert all(same(one, other) for one, other in zip(got, alone, strict=True))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("at_once")
def test_a_damaged_picture_is_replaced_or_stops_the_training_as_in_a_thread(folder: Path) -> None:
    examples = ImageFolder(folder, SPEC, random=True)
    said: list[str] = []
    order = training_order(1, COUNT, BATCH)
    with ReadingLoader(examples, order, workers=LEAST_WORKERS, on_bad="skip", notify=said.append) as feed:
        started(feed)
        (folder / "class 0" / "0.jpg").write_bytes(b"not a picture")
        while not feed.bad:
            next(feed)
    assert list(feed.bad) == ["class 0/0.jpg"]
    assert "0.jpg cannot be read" in said[0]
    with ReadingLoader(examples, training_order(1, COUNT, BATCH), workers=LEAST_WORKERS) as feed:
        with pytest.raises(BadExample, match=r"0.jpg cannot be read") as caught:
            deque(islice(feed, 3), maxlen=0)
        assert (caught.value.index, caught.value.name) == (0, "class 0/0.jpg")


@pytest.mark.usefixtures("at_once")
def test_a_killed_process_is_named(folder: Path) -> None:
    examples = ImageFolder(folder, SPEC)
    with ReadingLoader(examples, training_order(1, COUNT, BATCH), workers=LEAST_WORKERS) as feed:
        started(feed)
        for process in processes_of(feed)._started:
            os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(TrainError, match="reads examples ended with status -9"):
            deque(islice(feed, 100), maxlen=0)


@pytest.mark.usefixtures("at_once")
def test_examples_that_cannot_be_pickled_are_read_by_threads_and_that_is_said(folder: Path) -> None:
    examples = ImageFolder(folder, SPEC, decode=lambda body, kind: np.zeros(SPEC.shape, np.uint8))
    said: list[str] = []
    with ReadingLoader(examples, training_order(1, COUNT, BATCH), workers=LEAST_WORKERS, notify=said.append) as feed:
        deadline_s = time.monotonic() + 30
        while not said:
            next(feed)
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        for _ in range(5):
            next(feed)
    (sentence,) = said
    assert sentence.startswith("The examples are read by threads alone, which is slower: no process can read them (")


def test_a_short_pass_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_processes, "START_S", 600.0)
    with ReadingLoader(ImageFolder(folder, SPEC), training_order(1, COUNT, BATCH), workers=LEAST_WORKERS) as feed:
        next(feed)
        assert processes_of(feed)._started == []
    assert ReadingLoader(Counted(COUNT), training_order(1, COUNT, BATCH), workers=LEAST_WORKERS)._processes is None
