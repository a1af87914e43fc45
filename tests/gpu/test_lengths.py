"""Networks of varying length on a GPU: one CUDA graph by rows and length, the same answers as on a CPU."""

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.text import LONGEST, TextEncoder, app, texts
from penstock.core.dim import Dim
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.gpu.gpu_network import gpu_network
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import OK, SlotTable, TableLayout

pytestmark = pytest.mark.gpu

GB = 1 << 30
FP32 = GpuWay(precision="fp32")
INPUT, OUTPUT = app.input, app.output
assert isinstance(INPUT, RecordSpec)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return TextEncoder().eval()


def on_gpu(network: nn.Module, **given: Any) -> RecordGraphExecutor:
    way = GpuWay(precision=given.pop("precision", "fp32"))
    given = {"max_rows": 8, "device": "cuda:0", "limit_bytes": 4 * GB, **given}
    return RecordGraphExecutor(gpu_network(network, INPUT, OUTPUT, way, "cuda:0"), INPUT, OUTPUT, **given)


def records(lengths: list[int], seed: int = 0) -> Array:
    assert isinstance(INPUT, RecordSpec)
    rng = np.random.default_rng(seed)
    return INPUT.of_many(
        [
            {"input_ids": rng.integers(0, 8192, length), "attention_mask": np.ones(length, np.int64)}
            for length in lengths
        ]
    )


@pytest.fixture(scope="module")
def right() -> Any:
    torch.manual_seed(0)
    double = TextEncoder().double().eval()

    def answers(chunk_B: Array) -> Array:
        assert isinstance(INPUT, RecordSpec)
        alone = [INPUT.batch(chunk_B[row : row + 1]) for row in range(len(chunk_B))]
        with torch.inference_mode():
            return np.concatenate(
                [
                    double(torch.from_numpy(each["input_ids"]), torch.from_numpy(each["attention_mask"])).numpy()
                    for each in alone
                ]
            )

    return answers


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-4), ("bf16", 0.05), ("fp16", 0.01)])
def test_graphs_answer_as_float64_on_a_cpu(network: nn.Module, right: Any, precision: str, tolerance: float) -> None:
    executor = on_gpu(network, precision=precision)
    executor.capture_grid()
    assert executor.graphs == 4 * 6
    for lengths in ([16], [17, 60], [512], [16, 512, 33], [100] * 8, [31, 32, 33, 64, 65], [511]):
        chunk_B = records(lengths, len(lengths))
        found, expected = executor.predict(chunk_B), right(chunk_B)
        assert found.dtype == np.float32
        assert abs(found - expected).max() <= tolerance * max(1.0, abs(expected).max()), lengths
        # A replay with other rows behind it leaves nothing.
        assert np.array_equal(executor.predict(chunk_B), found)
    assert executor.uncaptured_batches == 0


def test_a_graph_answers_as_the_uncaptured_network(network: nn.Module) -> None:
    executor = on_gpu(network)
    chunk_B = records([20, 400, 90])
    plain = executor.predict(chunk_B)
    assert executor.uncaptured_batches == 1
    executor.capture_grid()
    np.testing.assert_allclose(executor.predict(chunk_B), plain, rtol=1e-3, atol=1e-4)
    assert executor.uncaptured_batches == 1


def test_poison_beyond_the_lengths_changes_nothing(network: nn.Module) -> None:
    executor = on_gpu(network)
    executor.capture_grid()
    chunk_B = records([20, 33, 16])
    clean = executor.predict(chunk_B)
    for row, length in enumerate((20, 33, 16)):
        chunk_B["input_ids"][row, length:] = 8191
        chunk_B["attention_mask"][row, length:] = 1
    assert np.array_equal(executor.predict(chunk_B), clean)


def test_a_shape_without_a_graph_is_captured_at_its_third_use(network: nn.Module) -> None:
    now_s = [100.0]
    executor = on_gpu(network, clock_s=lambda: now_s[0])
    chunk_B = records([40, 50])
    answers = [executor.predict(chunk_B) for _ in range(4)]
    assert (executor.graphs, executor.uncaptured_batches) == (1, 2)
    assert all(np.allclose(each, answers[0], rtol=1e-4, atol=1e-5) for each in answers)
    # A second shape waits a second.
    for _ in range(5):
        executor.predict(records([200]))
    assert executor.graphs == 1
    now_s[0] += 1.5
    executor.predict(records([200]))
    assert executor.graphs == 2


def test_beyond_the_limit_of_memory_the_least_used_go_and_it_is_said_once(
    network: nn.Module, right: Any, caplog: pytest.LogCaptureFixture
) -> None:
    executor = on_gpu(network, limit_bytes=60 << 20)
    with caplog.at_level(logging.WARNING):
        executor.capture_grid()
        at_start = executor.graphs
        assert 0 < at_start < 24
        for lengths in ([16] * 8, [512] * 8, [100] * 3, [16], [400], [60] * 8):
            chunk_B = records(lengths)
            executor.capture_for(chunk_B)
            np.testing.assert_allclose(executor.predict(chunk_B), right(chunk_B), rtol=1e-3, atol=2e-4)
    assert len([each for each in caplog.records if "limit of memory" in each.getMessage()]) == 1
    assert executor.graphs >= 1


class Synchronizes(nn.Module):
    """Reads a number on the host, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, words: Tensor, tokens: Tensor) -> Tensor:
        """Return the sums of rows, scaled by the longest length."""
        keep = torch.arange(words.shape[1], device=words.device) < tokens[:, None]
        total = (words * keep[..., None]).sum(1) * self.scale
        return total if int(tokens.max().item()) > 0 else total * 2


def test_a_network_that_cannot_be_captured_runs_and_the_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokens = Dim("tokens", max=64)
    words = RecordSpec((TensorSpec(dtype="float32", shape=(tokens, 2), meaning="vectors", name="words"),))
    sums = TensorSpec(dtype="float32", shape=(2,), meaning="their sum", name="sum")
    executor = RecordGraphExecutor(
        gpu_network(Synchronizes(), words, sums, FP32, "cuda:0"),
        words,
        sums,
        max_rows=4,
        device="cuda:0",
        limit_bytes=GB,
    )
    with caplog.at_level(logging.WARNING):
        executor.capture_grid()
        chunk_B = words.of_many([{"words": np.ones((length, 2), np.float32)} for length in (1, 9, 64)])
        assert executor.predict(chunk_B).tolist() == [[1, 1], [9, 9], [64, 64]]
    assert executor.reason is not None
    assert executor.graphs == 0
    assert len([each for each in caplog.records if "without CUDA graphs" in each.getMessage()]) == 1
    # The GPU still works.
    assert torch.ones(3, device="cuda:0").sum().item() == 3


class Boxes(nn.Module):
    """Gives as many boxes as there is room for, without lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, picture: Tensor) -> Tensor:
        """Return four numbers of each of three boxes."""
        return picture.mean(1)[:, None, None].expand(-1, 3, 4) * self.scale


def test_lengths_that_follow_from_the_shape_are_captured_too() -> None:
    boxes = Dim("boxes", max=3)
    picture = TensorSpec(dtype="float32", shape=(8,), meaning="numbers", name="picture")
    found = RecordSpec((TensorSpec(dtype="float32", shape=(boxes, 4), meaning="corners", name="corners"),))
    executor = RecordGraphExecutor(
        gpu_network(Boxes(), picture, found, FP32, "cuda:0"),
        picture,
        found,
        max_rows=4,
        device="cuda:0",
        limit_bytes=GB,
    )
    executor.capture_grid()
    assert executor.reason is None
    assert executor.graphs == 3
    answer = executor.predict(np.stack([np.full(8, row, np.float32) for row in range(3)]))
    assert answer["boxes"].tolist() == [3, 3, 3]
    assert answer["corners"][:, 2, 3].tolist() == [0, 1, 2]
    assert executor.uncaptured_batches == 0


def test_an_engine_measures_and_serves_by_edges(network: nn.Module, right: Any) -> None:
    executor = on_gpu(network, max_rows=16)
    executor.capture_grid()
    table = SlotTable.private(TableLayout(slots=64, chunks=1, input=INPUT, output=OUTPUT))
    clock = time.monotonic_ns
    engine = Engine(executor, table, budget_ns=10**9, clock_ns=clock)
    for _ in engine.measuring(records([LONGEST])[0]):
        pass
    assert isinstance(engine.costs, LengthCosts)
    assert engine.costs.padded
    # A graph takes no longer than tens of milliseconds; a capture in a measurement would.
    assert engine.costs.of(1, 16) < 20_000_000
    writer = TableWriter(table, budget_ns=10**9, wake=lambda: None)
    given = INPUT.of_many(texts(40, seed=3)) if isinstance(INPUT, RecordSpec) else None
    assert given is not None
    answers: dict[int, Array] = {}
    for row in range(40):

        def done(status: int, output: Array, last: bool, row: int = row) -> None:
            assert status == OK
            answers[row] = output.copy()

        writer.submit(given[row], done=done, arrival_ns=clock())
    while len(answers) < 40:
        engine.tick(clock())
        writer.collect()
    np.testing.assert_allclose(np.stack([answers[row] for row in range(40)]), right(given), rtol=1e-3, atol=2e-4)
    assert table.uncaptured[0] == 0
