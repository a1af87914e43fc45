from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.dim import Dim
from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.data import resident as resident_module
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.loader import Batch, Loader, ReadingLoader, first_inputs
from penstock.train.data.readers import in_order, read_piece, reading_threads
from penstock.train.data.resident import Resident, keep_on_device, make_loader
from penstock.train.data.sampler import (
    BatchIndices,
    Indices,
    Seeds,
    batch_indices,
    draws_of,
    example_seeds,
    one_pass,
    training_order,
)
from tests.support.examples import Counted

SEED = 5
CPU = torch.device("cpu")


def order(count: int, batch: int, steps: int) -> "islice[BatchIndices]":
    return islice(training_order(SEED, count, batch), steps)


def batches(feed: Loader) -> list[Batch]:
    with feed:
        return list(feed)


def same(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_whoever_reads_them(workers: int) -> None:
    examples = Counted(50, slow_s=0.002)
    got = batches(ReadingLoader(examples, order(50, 20, 6), workers=workers))
    assert len(got) == 6
    for step, batch in enumerate(got):
        indices = batch_indices(SEED, 20 * step, 20, 50)
        assert batch.inputs[:, 0].tolist() == indices.tolist()
        assert batch.targets.tolist() == (10 * indices).tolist()
    assert same(got, batches(ReadingLoader(Counted(50), order(50, 20, 6))))
    if workers:
        assert all(name.startswith("penstock-read") for name in examples.threads)


def test_an_example_is_read_by_another_seed_in_each_epoch() -> None:
    first, second = batches(ReadingLoader(Counted(30), order(30, 30, 2)))
    assert sorted(first.inputs[:, 0].tolist()) == sorted(second.inputs[:, 0].tolist())
    assert set(first.inputs[:, 1].tolist()).isdisjoint(second.inputs[:, 1].tolist())


def test_a_feed_that_begins_later_goes_on_as_the_first_would_have() -> None:
    whole = batches(ReadingLoader(Counted(50, bad=(3, 4)), order(50, 20, 6), workers=2, on_bad="skip"))
    later = batches(
        ReadingLoader(Counted(50, bad=(3, 4)), islice(training_order(SEED, 50, 20, first_step=4), 2), on_bad="skip")
    )
    assert same(whole[4:], later)


def test_processes_that_take_rows_make_up_the_global_batch() -> None:
    whole = batches(ReadingLoader(Counted(50, bad=(7,)), order(50, 20, 3), on_bad="skip"))
    halves = [
        batches(
            ReadingLoader(
                Counted(50, bad=(7,)), islice(training_order(SEED, 50, 20, rows=rows), 3), workers=2, on_bad="skip"
            )
        )
        for rows in (slice(0, 12), slice(12, 20))
    ]
    join_world = [Batch(*(torch.cat(parts) for parts in zip(*both, strict=True))) for both in zip(*halves, strict=True)]
    assert same(whole, join_world)


def test_reading_ahead_is_bounded() -> None:
    examples = Counted(10_000)
    with ReadingLoader(examples, training_order(SEED, 10_000, 8), workers=2) as feed:
        for _ in range(3):
            next(feed)
    # A batch is one piece here: three were asked for, and no more than two for each worker are begun ahead.
    assert 3 <= examples.reads <= 3 + 4


def test_waiting_is_measured() -> None:
    class Clocked(Loader):
        def _next(self) -> Batch:
            torch.zeros(100_000).sort()
            return Batch(torch.zeros(1), torch.zeros(1))

        def close(self) -> None:
            pass

    feed = Clocked(order=iter(()))
    assert feed.waited_s == 0
    next(feed)
    once = feed.waited_s
    next(feed)
    assert feed.waited_s > once > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_example_stops_at_its_batch(workers: int) -> None:
    bad = int(batch_indices(SEED, 45, 1, 50)[0])
    with ReadingLoader(Counted(50, bad=(bad,)), order(50, 20, 5), workers=workers) as feed:
        assert len([next(feed), next(feed)]) == 2
        with pytest.raises(BadExample, match=f"example {bad} is bad"):
            next(feed)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_bad_examples_are_replaced_named_and_counted(workers: int) -> None:
    said: list[str] = []
    examples = Counted(50, bad=(3, 4))
    feed = ReadingLoader(examples, order(50, 25, 6), workers=workers, on_bad="skip", notify=said.append)
    got = batches(feed)
    indices = np.concatenate([batch.inputs[:, 0].numpy() for batch in got])
    assert len(indices) == 150
    assert set(indices.tolist()) == set(range(50)) - {3, 4}
    # Three epochs, in each of which both were met at least once: one may have stood in for the other.
    assert set(feed.bad) == {"3.jpg", "4.jpg"}
    assert feed.bad == batch_counts()
    assert sorted(said) == [f"example {bad} is bad. It is replaced by another example." for bad in (3, 4)]
    assert all((batch.targets == 10 * batch.inputs[:, 0]).all() for batch in got)


def batch_counts() -> dict[str, int]:
    feed = ReadingLoader(Counted(50, bad=(3, 4)), order(50, 25, 6), on_bad="skip")
    batches(feed)
    return feed.bad


def test_a_piece_is_not_read_again_for_each_of_its_bad_examples() -> None:
    examples = Counted(100, bad=tuple(range(0, 100, 2)))
    asked: list[int] = []
    read = examples.read

    def counting(indices_B: Any, seeds_B: Any, inputs_B: Any) -> Any:
        asked.append(len(indices_B))
        return read(indices_B, seeds_B, inputs_B)

    examples.read = counting
    batches(ReadingLoader(examples, order(100, 100, 1), on_bad="skip"))
    # Each once with its piece, then alone until one of them is good: twice on average.
    assert sum(asked) < 500


def test_nothing_but_bad_examples_ends_even_when_they_are_skipped() -> None:
    with pytest.raises(TrainError, match="64 examples in a row cannot be read, the last one: example"):
        batches(ReadingLoader(Counted(9, bad=tuple(range(9))), order(9, 4, 1), on_bad="skip"))


class Halves(Examples):
    """Records. The second one is found to be bad when its inputs are written."""

    def __init__(self) -> None:
        self.declare(RecordSpec((TensorSpec(dtype="int64", shape=(Dim("n", max=6),), meaning="", name="ids"),)))

    def __len__(self) -> int:
        return 4

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        for row, index in enumerate(indices_B.tolist()):
            length = 6 if index == 1 else 2
            inputs_B["ids"][row, :length], inputs_B["n"][row] = 7, length
            if index == 1:
                raise BadExample("1 has no target.", index=1, name="1")
        return np.zeros(len(indices_B), np.int64)


def test_the_padding_of_a_replacement_has_nothing_of_the_bad_example() -> None:
    examples = Halves()
    piece = read_piece(examples, next(one_pass(4, 4)), examples.empty(4), "skip")
    assert [error.index for error in piece.bad] == [1]
    assert piece.inputs_P["ids"].tolist() == [[7, 7, 0, 0, 0, 0]] * 4


def test_a_bad_example_that_was_not_asked_for_is_a_mistake_of_the_set() -> None:
    examples = Counted(9, raises=BadExample("x.", index=99, name="x"))
    with pytest.raises(TrainError, match="names example 99, which was not requested"):
        batches(ReadingLoader(examples, order(9, 4, 1), on_bad="skip"))


def test_what_else_goes_wrong_in_a_worker_is_not_hidden() -> None:
    broken = Counted(50, raises=ZeroDivisionError("of a worker"))
    with (
        pytest.raises(ZeroDivisionError, match="of a worker"),
        ReadingLoader(broken, order(50, 20, 1), workers=2) as feed,
    ):
        next(feed)


def test_one_pass_is_every_example_once() -> None:
    got = batches(ReadingLoader(Counted(50, varies=False), one_pass(50, 20), workers=2))
    assert [len(batch.inputs) for batch in got] == [20, 20, 10]
    assert torch.cat([batch.inputs[:, 0] for batch in got]).tolist() == list(range(50))


def test_first_inputs_are_the_first_that_can_be_read() -> None:
    assert first_inputs(Counted(50), 3)[:, 0].tolist() == [0, 1, 2]
    assert first_inputs(Counted(2), 3)[:, 0].tolist() == [0, 1]
    assert 1 not in first_inputs(Counted(50, bad=(1,)), 3, on_bad="skip")[:, 0]
    with pytest.raises(BadExample):
        first_inputs(Counted(50, bad=(1,)), 3)


@pytest.mark.parametrize("bad", [(), (3, 4, 41)])
def test_resident_examples_make_the_same_batches(bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # More batches than are copied at once.
    monkeypatch.setattr(resident_module, "INDICES_AT_ONCE", 50)
    read = ReadingLoader(Counted(50, bad=bad, varies=False), order(50, 20, 8), on_bad="skip")
    examples = Resident(Counted(50, bad=bad, varies=False), CPU, workers=2)
    resident = make_loader(examples, order(50, 20, 8), workers=2, on_bad="skip")
    assert same(batches(read), batches(resident))
    assert read.bad == resident.bad


def test_resident_examples_stop_at_the_same_batch() -> None:
    bad = int(batch_indices(SEED, 45, 1, 50)[0])
    feed = make_loader(Resident(Counted(50, bad=(bad,), varies=False), CPU, 1), order(50, 20, 5), workers=1)
    assert len([next(feed), next(feed)]) == 2
    with pytest.raises(BadExample, match=f"example {bad} is bad"):
        next(feed)
    with pytest.raises(BadExample, match="example 0 is bad"):
        Resident(Counted(3, bad=(0, 1, 2), varies=False), CPU, 1)


def test_examples_stay_where_they_are_on_a_cpu() -> None:
    examples = Counted(50, varies=False)
    said: list[str] = []
    assert keep_on_device(examples, CPU, workers=2, notify=said.append) is examples
    assert (said, examples.reads) == ([], 0)


def test_what_fits_into_a_quarter_of_a_gpus_free_memory_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # 50 examples of 256 KiB are 13.1 MB; where they end up is the GPU's tests' to see.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr("penstock.train.data.resident.Resident", lambda *arguments: arguments)
    examples, changing, said = Counted(50, varies=False), Counted(50), list[str]()
    device = torch.device("cuda", 0)
    free = 4 * 50 * (1 << 18)
    assert keep_on_device(examples, device, workers=2, notify=said.append)[:3] == (examples, device, 2)  # pyright: ignore
    assert keep_on_device(changing, device, workers=2, notify=said.append) is changing
    free -= 4
    assert keep_on_device(examples, device, workers=2, notify=said.append) is examples
    assert said == [
        "The examples (0.0 GB) stay on cuda:0: 0.0 GB are free for them.",
        "The examples (0.0 GB) are read by 2 threads: they are read differently in each epoch.",
        "The examples (0.0 GB) are read by 2 threads: 0.0 GB are free for them.",
    ]


def test_examples_in_memory_need_no_worker() -> None:
    inputs = np.arange(24.0).reshape(12, 2)
    feed = make_loader(ArraySet(inputs=inputs, targets=np.arange(12)), order(12, 5, 4), workers=3)
    got = batches(feed)
    for step, batch in enumerate(got):
        indices = batch_indices(SEED, 5 * step, 5, 12)
        np.testing.assert_array_equal(batch.inputs.numpy(), inputs[indices])
        np.testing.assert_array_equal(batch.targets.numpy(), indices)
    # A batch is the step's own: what it does to it is not done to the examples.
    got[0].inputs.zero_()
    assert inputs.sum() == np.arange(24).sum()


def test_in_order_leaves_out_what_is_bad() -> None:
    pieces = list(in_order(Counted(50, bad=(0, 19, 20)), one_pass(50, 10), 3))
    assert np.concatenate([piece.indices_P for piece in pieces]).tolist() == [
        i for i in range(50) if i not in (0, 19, 20)
    ]
    assert [error.index for piece in pieces for error in piece.bad] == [0, 19, 20]
    assert all((piece.inputs_P[:, 0] == piece.indices_P).all() for piece in pieces)
    assert all((piece.targets_P == 10 * piece.indices_P).all() for piece in pieces)


def test_chance_is_even_and_each_rows_own() -> None:
    seeds = example_seeds(1, np.repeat(np.arange(20), 500), np.tile(np.arange(500), 20))
    assert len(np.unique(seeds)) == 10_000
    draws = draws_of(seeds, 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.abs(draws.mean(0) - 0.5).max() < 0.015
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.04
    by_epoch = draws[:, 0].reshape(20, 500)
    assert np.abs(np.array(np.corrcoef(by_epoch)) - np.eye(20)).max() < 0.2
    np.testing.assert_array_equal(draws_of(seeds[7:9], 2), draws[7:9, :2])
    assert (example_seeds(1, np.zeros(9, int), np.arange(9)) != example_seeds(2, np.zeros(9, int), np.arange(9))).all()


def test_a_core_is_left_to_the_steps() -> None:
    assert reading_threads() >= 1
    assert reading_threads(processes=1000) == 1
