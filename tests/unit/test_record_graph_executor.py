"""CUDA graphs by rows and length, without a GPU: order of copies and graphs, capture, and replacement."""

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.dim import Dim
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import StepInput
from penstock.runtime.gpu import record_buffers
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import CAPTURE_EVERY_S, USES
from penstock.runtime.gpu.record_buffers import Block
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import OK, SlotTable, TableLayout
from tests.support.fake_cuda import FakeCuda, FakeGraph

BATCH = np.array([[3.0, 5.0], [1.0, 2.0]], np.float32)
POINT = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers")
TOKENS = Dim("tokens", max=16, min=2)
IDS = TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", name="ids", limits=(1, 99))
TEXT = RecordSpec((IDS, TensorSpec(dtype="uint8", shape=(TOKENS, 2), meaning="marks", name="marks")))
FOUND = RecordSpec(
    (
        TensorSpec(dtype="float32", shape=(), meaning="the sum", name="total"),
        TensorSpec(dtype="int64", shape=(TOKENS,), meaning="each id, doubled", name="twice"),
    )
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class Totals(nn.Module):
    """Sums and doubles of the valid part of texts."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, ids: Tensor, marks: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of ids and marks, and twice each id."""
        assert int(ids.min()) >= 0
        keep = torch.arange(ids.shape[1]) < tokens[:, None]
        return (ids * keep).sum(1).float() + (marks.float().sum(2) * keep).sum(1) + self.shift, ids * 2 * keep


def texts(lengths: list[int], seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return TEXT.of_many(
        [{"ids": rng.integers(1, 99, length), "marks": rng.integers(0, 9, (length, 2), np.uint8)} for length in lengths]
    )


def right(records: Array, shift: int = 0) -> Array:
    given = [TEXT.unpack(record) for record in records]
    return FOUND.of_many(
        [
            {"total": np.float32(each["ids"].sum() + each["marks"].sum() + shift), "twice": each["ids"] * 2}
            for each in given
        ]
    )


def totals(**given: Any) -> RecordGraphExecutor:
    network = GpuNetwork(Totals(), TEXT, FOUND, "fp32")
    named: dict[str, Any] = {"max_rows": 8, "device": "cpu", "limit_bytes": 1 << 30, "timed": True, **given}
    return RecordGraphExecutor(network, TEXT, FOUND, **named)


def batch_of(chunk_B: Array) -> StepInput:
    ones = np.ones(len(chunk_B), np.int64)
    return StepInput(slots_B=ones.cumsum(), chunk_B=chunk_B, length_B=ones, fresh_B=ones > 0)


class NoZeros(nn.Module):
    """A network that raises on zeros, as one does that picks the first token that is no padding."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.trials = error, 0

    def forward(self, chunk_B: Tensor) -> Tensor:
        if not chunk_B.any():
            self.trials += 1
            raise self.error
        return chunk_B * 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no token here."), "zeros: RuntimeError: no token here)"),
        (ValueError("empty"), "zeros: ValueError: empty)"),
        (torch.cuda.OutOfMemoryError("5 GB"), "the memory of the GPU does not suffice)"),
    ],
)
def test_requests_are_answered_where_the_trial_of_their_shape_fails_and_it_is_tried_and_said_once(
    error: Exception, reason: str, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter(range(100))
    network = NoZeros(error)
    executor = RecordGraphExecutor(
        GpuNetwork(network, POINT, POINT, "fp32"),
        POINT,
        POINT,
        max_rows=4,
        device="cpu",
        limit_bytes=1 << 30,
        clock_s=lambda: next(seconds) * 2 * CAPTURE_EVERY_S,
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * USES):
            np.testing.assert_array_equal(executor.predict(BATCH), BATCH * 2)
    assert network.trials == 1
    assert executor.uncaptured_batches == 3 * USES
    [said] = caplog.messages
    assert said.startswith("batches of rows 2")
    assert said.endswith(reason)


@pytest.mark.parametrize("beside_bytes", [record_buffers.BESIDE_BYTES, 0])
def test_a_batch_is_prepared_while_another_runs_and_neither_changes_the_other(
    beside_bytes: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All work of the GPU is done as late as it can be: what overwrites too early is seen.
    monkeypatch.setattr(record_buffers, "BESIDE_BYTES", beside_bytes)
    executor = totals()
    executor.capture_grid()
    rng = np.random.default_rng(0)
    table_E = texts(rng.integers(2, 17, 64).tolist())
    expected_E = right(table_E)
    # Whatever lies beyond a length is poison.
    for record in table_E:
        record["ids"][record["tokens"] :] = -7
        record["marks"][record["tokens"] :] = 200
    begun: list[tuple[list[int], Any]] = []
    for _ in range(40):
        rows = rng.choice(64, rng.integers(1, 9), replace=False).tolist()
        gathered = table_E[rows]
        begun.append((rows, executor.begin(batch_of(gathered))))
        # The next batch is gathered into the same memory.
        gathered.view(np.uint8)[:] = 255
        assert not executor.done(begun[-1][1])
        if len(begun) == record_buffers.IN_FLIGHT:
            first, handle = begun.pop(0)
            assert np.array_equal(executor.finish(handle).output_B, expected_E[first])
    assert executor.uncaptured_batches == 0
    assert np.array_equal(executor.finish(begun[0][1]).output_B, expected_E[begun[0][0]])
    assert np.array_equal(executor.predict(table_E[:3]), expected_E[:3])


def test_a_batch_without_a_graph_is_computed_at_once_beside_one_that_runs(cuda: FakeCuda) -> None:
    executor = totals()
    table_E = texts([16, 15, 2, 3])
    assert executor.capture_for(table_E[:2])
    running = executor.begin(batch_of(table_E[[0, 1]]))
    at_once = executor.begin(batch_of(table_E[[2]]))
    assert not executor.done(running)
    assert executor.done(at_once)
    assert executor.uncaptured_batches == 1
    expected_E = right(table_E)
    assert np.array_equal(executor.finish(running).output_B, expected_E[:2])
    assert np.array_equal(executor.finish(at_once).output_B, expected_E[2:3])


def test_graphs_that_make_room_have_finished_their_batch(cuda: FakeCuda) -> None:
    clock_s = iter(np.arange(1000) * 2 * CAPTURE_EVERY_S)
    table_E = texts([16, 2])
    # Room for one graph.
    executor = totals(limit_bytes=(4 << 20) + 2000, clock_s=lambda: next(clock_s))
    assert executor.capture_for(table_E[:1])
    for _ in range(USES - 1):
        executor.predict(table_E[1:])
    running = executor.begin(batch_of(table_E[[0]]))
    # Its third use: the other graph goes.
    other = executor.begin(batch_of(table_E[[1]]))
    assert executor.graphs == 1
    assert cuda.graphs[0].run is None
    expected_E = right(table_E)
    assert np.array_equal(executor.finish(running).output_B, expected_E[:1])
    assert np.array_equal(executor.finish(other).output_B, expected_E[1:])


def test_an_engine_begins_a_batch_while_another_runs_and_every_row_gets_its_own_answer(cuda: FakeCuda) -> None:
    executor = totals()
    executor.capture_grid()
    grid = LengthGrid.of(TEXT)
    assert grid is not None
    table = SlotTable.private(TableLayout(slots=64, chunks=1, input=TEXT, output=FOUND))
    # Batches of more than a millisecond overlap.
    costs = LengthCosts(grid, [1, 8], np.full((len(grid.edges), 2), 1.5e6))
    engine = Engine(executor, table, budget_ns=10**10, clock_ns=time.monotonic_ns, costs=costs)
    writer = TableWriter(table, budget_ns=10**10, wake=lambda: None)
    records = texts(np.random.default_rng(1).integers(2, 17, 60).tolist())
    expected = right(records)
    answers: dict[int, Array] = {}
    overlapped = 0
    for row, record in enumerate(records):

        def done(status: int, output: Array, last: bool, row: int = row) -> None:
            assert (status, last) == (OK, True)
            answers[row] = output.copy()

        writer.submit(record, done=done, arrival_ns=time.monotonic_ns())
        if row % 12 == 11:
            engine.tick(time.monotonic_ns())
            overlapped += engine.running
            writer.collect()
    for _ in range(60):
        engine.tick(time.monotonic_ns())
        writer.collect()
    assert overlapped
    assert not engine.running
    assert np.array_equal(np.concatenate([answers[row] for row in range(60)]), expected)
    assert table.uncaptured[0] == 0


def test_a_faster_network_replaces_a_graph_and_answers_for_the_smaller_shapes_too(cuda: FakeCuda) -> None:
    executor = totals()
    cuda.ms = lambda graph: 1.0
    executor.capture_grid()
    compiled = GpuNetwork(Totals(shift=1), TEXT, FOUND, "fp32")
    before = len(cuda.graphs)

    def offered_ms(graph: FakeGraph) -> float:
        return 0.5 if graph is cuda.graphs[before] else 1.0

    cuda.ms = offered_ms
    table_E = texts([4, 4, 4, 16])
    running = executor.begin(batch_of(table_E[[0, 1, 2]]))
    assert executor.offer((8, 4), compiled) == 0.5
    # The batch under way has the graph with which it was begun.
    assert np.array_equal(executor.finish(running).output_B, right(table_E[:3]))
    # Three rows need a graph of four, but that of eight takes less time now.
    assert np.array_equal(executor.predict(table_E[:3]), right(table_E[:3], shift=1))
    assert np.array_equal(executor.predict(table_E[3:]), right(table_E[3:]))
    assert executor.graph_shapes[4, 4] == 2
    # One that is not faster is left out.
    cuda.ms = lambda graph: 1.0
    assert executor.offer((4, 4), compiled) is None
    assert executor.offer((3, 4), compiled) is None


def test_a_network_that_takes_too_much_memory_for_the_pool_is_left_out(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = totals()
    executor.capture_grid()
    times_ms = iter([1.0, 2.0])
    cuda.ms = lambda graph: next(times_ms)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1 << 31)
    assert executor.offer((8, 4), GpuNetwork(Totals(1), TEXT, FOUND, "fp32")) is None
    assert "reached their limit of memory" in caplog.text
    table_E = texts([4] * 8)
    assert np.array_equal(executor.predict(table_E), right(table_E))


def test_the_tensors_of_a_block_lie_apart() -> None:
    shapes = {"a": (3, 2), "b": (0, 4), "c": ()}
    block = Block.of(
        {name: (np.dtype(kind), shapes[name]) for name, kind in zip("abc", ("?", "<i8", "<f2"), strict=True)}
    )
    memory = torch.full((block.nbytes,), 7, dtype=torch.uint8)
    arrays, tensors = block.arrays(memory.numpy()), block.tensors(memory)
    for number, name in enumerate("abc"):
        arrays[name][...] = number
        assert tuple(tensors[name].shape) == shapes[name]
    assert [arrays[name].ravel().tolist() for name in "abc"] == [[False] * 6, [], [2.0]]
    assert tensors["c"].item() == 2.0
    assert np.shares_memory(arrays["a"], memory.numpy())
