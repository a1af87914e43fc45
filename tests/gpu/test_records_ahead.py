"""Networks of several tensors on a GPU: batches that overlap, and compiled shapes; prints what each takes."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models import gpu_networks
from penstock import Bundle
from penstock.core.bundles.bundle import read_bundle
from penstock.core.record import RecordSpec
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.execution import Execution
from penstock.runtime.executor import StepInput
from penstock.runtime.gpu.compile_records import CompileRecords
from penstock.runtime.gpu.gpu_choice import gpu_runnable
from penstock.runtime.gpu.gpu_network import gpu_network
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.gpu.record_buffers import BESIDE_BYTES
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor
from penstock.runtime.runnable import Runnable

pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS, BATCHES = 64, 100
SIDE = 128


def batch_of(chunk_B: Array) -> StepInput:
    ones = np.ones(len(chunk_B), np.int64)
    return StepInput(slots_B=ones.cumsum(), chunk_B=chunk_B, length_B=ones, fresh_B=ones > 0)


def ms_a_batch(executor: RecordGraphExecutor, chunk_B: Array, in_flight: int) -> float:
    begun: deque[Any] = deque()
    for _ in range(2):
        executor.step(batch_of(chunk_B))
    start_s = time.perf_counter()
    for _ in range(BATCHES):
        begun.append(executor.begin(batch_of(chunk_B)))
        if len(begun) == in_flight:
            executor.finish(begun.popleft())
    while begun:
        executor.finish(begun.popleft())
    return (time.perf_counter() - start_s) / BATCHES * 1e3


class Means(torch.nn.Module):
    """Means of the pixels of pictures, in blocks, beside a number that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, pixels: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Return `[B, SIDE, SIDE]`."""
        return pixels.float().mean(3) * self.scale + shift[:, None, None]


def test_large_batches_overlap_and_none_changes_another() -> None:
    given = RecordSpec(
        (
            TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="pixels", name="pixels"),
            TensorSpec(dtype="float32", shape=(), meaning="a number", name="shift"),
        )
    )
    found = TensorSpec(dtype="float32", shape=(SIDE, SIDE), meaning="means", name="means")
    network = gpu_network(Means(), given, found, GpuWay(precision="fp32"), "cuda:0")
    executor = RecordGraphExecutor(network, given, found, max_rows=ROWS, device="cuda:0", limit_bytes=4 << 30)
    executor.capture_grid()
    assert ROWS * SIDE * SIDE * 3 > BESIDE_BYTES
    rng = np.random.default_rng(0)
    table = given.empty(2 * ROWS)
    table["pixels"] = rng.integers(0, 256, table["pixels"].shape, np.uint8)
    table["shift"] = rng.normal(size=len(table))
    right = table["pixels"].astype(np.float32).mean(3) + table["shift"][:, None, None]
    begun: deque[tuple[Array, Any]] = deque()
    for _ in range(60):
        rows = rng.choice(len(table), rng.integers(1, ROWS + 1), replace=False)
        chunk_B = table[rows]
        begun.append((rows, executor.begin(batch_of(chunk_B))))
        chunk_B.view(np.uint8)[:] = 255
        if len(begun) == 2:
            asked, handle = begun.popleft()
            np.testing.assert_allclose(executor.finish(handle).output_B, right[asked], atol=1e-3)
    assert executor.uncaptured_batches == 0
    executor.finish(begun.popleft()[1])
    times_ms = [ms_a_batch(executor, table[:ROWS], in_flight) for in_flight in (1, 2)]
    print(f"\n{ROWS} pictures: one batch at a time {times_ms[0]:.3f} ms, two {times_ms[1]:.3f} ms")


def runnable_of(folder: Path) -> Runnable:
    found = find_application(f"{gpu_networks.__file__}:bert_128")
    if not (folder / "bundle").exists():
        torch.manual_seed(0)
        Bundle.write(found, found.model().eval(), gpu_networks.texts(4), to=folder / "bundle")
    how = Execution(cache=folder / "cache", cores=8, device="cuda:0", precision="bf16", compile=True, max_rows=ROWS)
    return gpu_runnable(read_bundle(folder / "bundle"), found, how, slots=256)


def test_bert_runs_compiled_and_from_the_cache_at_the_next_start(tmp_path: Path) -> None:
    runnable = runnable_of(tmp_path)
    executor, ahead = runnable.executor, runnable.compile_ahead
    assert isinstance(executor, RecordGraphExecutor)
    assert isinstance(ahead, CompileRecords)
    assert executor.fallback == ""
    sizes = ahead.sizes([ROWS, ROWS])
    assert sizes[:2] == [(ROWS, 128), (ROWS, 64)]
    texts = executor.input.of_many(gpu_networks.texts(ROWS)) if isinstance(executor.input, RecordSpec) else None
    assert texts is not None
    before = executor.predict(texts)
    plain_ms = [ms_a_batch(executor, texts, in_flight) for in_flight in (1, 2)]
    start_s = time.perf_counter()
    (compiled,) = ahead.batches([(ROWS, 128)])
    took_s = time.perf_counter() - start_s
    print(f"\nBERT-base, {ROWS} x 128, bf16: plain graph {plain_ms[0]:.2f} ms, two in flight {plain_ms[1]:.2f} ms")
    assert ahead.reason == ""
    assert compiled.ms is not None, "the plain graph is faster"
    tolerance = 0.05 * np.abs(before).max()
    np.testing.assert_allclose(executor.predict(texts), before, atol=tolerance)
    # Fewer rows may run in the graph that is compiled.
    np.testing.assert_allclose(executor.predict(texts[:33]), before[:33], atol=tolerance)
    times_ms = [ms_a_batch(executor, texts, in_flight) for in_flight in (1, 2)]
    print(
        f"compiled in {took_s:.1f} s: graph alone {compiled.ms:.2f} ms, one at a time {times_ms[0]:.2f} ms, "
        f"two in flight {times_ms[1]:.2f} ms, {ROWS / times_ms[1] * 1e3:,.0f} rows/s"
    )
    assert times_ms[1] < plain_ms[1]
    again = runnable_of(tmp_path)
    restarted = again.compile_ahead
    assert isinstance(restarted, CompileRecords)
    start_s = time.perf_counter()
    (known,) = restarted.batches([(ROWS, 128)])
    print(f"from the cache in {time.perf_counter() - start_s:.1f} s")
    assert known.rows == ROWS
    assert restarted.reason == ""
