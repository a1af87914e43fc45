"""States in one table: streams that come, go and pause in any order, each answered as if it were alone."""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ApplicationError
from penstock.core.spec import TensorSpec
from penstock.nn.streaming import Streaming
from penstock.runtime.executor import Executor
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.onnx.onnx_executor import steady_graph
from penstock.runtime.state_table import StateTable
from penstock.runtime.streaming_executor import StatefulNetwork, StreamingExecutor
from penstock.runtime.whole_signals import run_in_chunks
from tests.support.company import (
    CHUNK,
    FEATURES,
    FRAMES,
    SCORES,
    SLOTS,
    batch,
    by_onnx,
    exact_in_any_company,
    executor,
    network,
    offline,
    several_saved,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported step of the network, that of steady batches beside it."""
    file = tmp_path_factory.mktemp("graph") / "step.onnx"
    command = [sys.executable, "-m", "tests.support.company", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return file


def play(made: Executor, seed: int, ticks: int = 40) -> float:
    """Streams begin, pause, end and are followed by others in their slots; gives the worst difference from offline."""
    rng = np.random.default_rng(seed)
    sent: dict[int, list[np.ndarray]] = defaultdict(list)
    given_back: dict[int, list[np.ndarray]] = defaultdict(list)
    owner: dict[int, int] = {}
    ended: list[int] = []
    streams = 0
    for tick in range(ticks):
        rows: list[tuple[int, np.ndarray, bool, bool]] = []
        keys: list[int] = []
        for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist():
            fresh = slot not in owner
            if fresh:
                owner[slot], streams = streams, streams + 1
            key = owner[slot]
            frames = rng.normal(size=(int(rng.integers(0, FRAMES + 1)), FEATURES)).astype(np.float32)
            last = bool(rng.random() < 0.2) or tick == ticks - 1
            sent[key].append(frames)
            keys.append(key)
            rows.append((slot, frames, fresh, last))
            if last:
                ended.append(key)
                del owner[slot]
        result = made.step(batch(rows))
        assert result.length_B is not None
        for key, output, count in zip(keys, result.output_B, result.length_B, strict=True):
            given_back[key].append(output[:count].copy())
    worst = 0.0
    for key in ended:
        frames, outputs = np.concatenate(sent[key]), np.concatenate(given_back[key])
        expected = offline(frames) if len(frames) else outputs[:0]
        assert outputs.shape == expected.shape
        worst = max(worst, float(np.abs(outputs - expected).max(initial=0.0)))
    return worst


@pytest.mark.thorough
@given(st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_stream_is_answered_as_if_it_were_alone(seed: int) -> None:
    assert play(executor(), seed) < 1e-5


@pytest.mark.thorough
@given(st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_stream_is_answered_as_if_it_were_alone_by_onnx_runtime(graph: Path, seed: int) -> None:
    assert play(by_onnx(graph), seed, 20) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("frames", range(1, FRAMES + 1))
def test_both_graphs_give_the_offline_answers_however_a_signal_is_cut(graph: Path, tmp_path: Path, frames: int) -> None:
    whole_BT = np.random.default_rng(frames).normal(size=(3, 41, FEATURES)).astype(np.float32)
    expected = np.stack([offline(whole_T) for whole_T in whole_BT])
    alone = tmp_path / graph.name
    shutil.copy(graph, alone)
    assert steady_graph(graph).is_file()
    for file in (graph, alone):
        np.testing.assert_allclose(run_in_chunks(by_onnx(file), whole_BT, frames), expected, atol=1e-5)


@pytest.mark.thorough
def test_the_graph_of_steady_batches_runs_them_and_no_others(graph: Path, tmp_path: Path) -> None:
    alone = tmp_path / graph.name
    shutil.copy(graph, alone)
    # What gives zeros alone is seen where it runs.
    model = onnx.load(steady_graph(graph))
    model.graph.node.append(onnx.helper.make_node("Mul", ["given", "none"], [model.graph.output[0].name]))
    maker = next(node for node in model.graph.node if model.graph.output[0].name in node.output)
    maker.output[0] = "given"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.float32), "none"))
    onnx.save(model, steady_graph(alone))
    made, right = by_onnx(alone), executor()
    frames = np.random.default_rng(0).normal(size=(FRAMES, FEATURES)).astype(np.float32)
    ran: list[bool] = []
    for length, last in [(FRAMES, False)] * 6 + [(2, False), (FRAMES, False), (FRAMES, True)]:
        rows = batch([(slot, frames[:length], not ran, last) for slot in (1, 3)])
        ours, theirs = made.step(rows), right.step(rows)
        assert ours.length_B is not None
        valid = ours.output_B[:, : ours.length_B[0]]
        ran.append(valid.size > 0 and not valid.any())
        if not ran[-1]:
            np.testing.assert_allclose(valid, theirs.output_B[:, : ours.length_B[0]], atol=1e-5)
    # Not where streams begin, send less than a chunk, or end.
    assert ran == [False] * 2 + [True] * 4 + [False, True, False]


@pytest.mark.thorough
def test_a_row_without_a_frame_keeps_its_state_bit_for_bit_by_onnx_runtime(graph: Path) -> None:
    made = by_onnx(graph)
    frames = np.random.default_rng(0).normal(size=(FRAMES, FEATURES)).astype(np.float32)
    for fresh in (True, False, False):
        made.step(batch([(0, frames, fresh, False), (2, frames[:3], fresh, False)]))
    before = made.states.save(2)
    made.step(batch([(0, frames, False, False), (2, frames[:0], False, False), (4, frames, True, False)]))
    assert all(map(torch.equal, made.states.save(2), before))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_every_stream_is_answered_as_if_it_were_alone_by_graphs(seed: int) -> None:
    assert play(executor(CudaGraphExecutor), seed) < 1e-4


def test_a_stream_is_saved_and_continues_in_another_executor() -> None:
    frames = np.random.default_rng(0).normal(size=(3 * FRAMES, FEATURES)).astype(np.float32)
    here, there = executor(), executor()
    first = here.step(batch([(2, frames[:FRAMES], True, False)]))
    assert first.length_B is not None
    outputs = [first.output_B[0, : first.length_B[0]].copy()]
    there.states.restore(4, here.states.save(2))
    for start, last in ((FRAMES, False), (2 * FRAMES, True)):
        result = there.step(batch([(4, frames[start : start + FRAMES], False, last)]))
        assert result.length_B is not None
        outputs.append(result.output_B[0, : result.length_B[0]].copy())
    np.testing.assert_allclose(np.concatenate(outputs), offline(frames), atol=1e-6)


def test_several_states_are_read_and_written_at_once() -> None:
    several_saved(StreamingExecutor)


@given(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True), st.data())
@settings(deadline=None, max_examples=20)
def test_packed_states_are_restored_bit_for_bit(slots: list[int], data: st.DataObject) -> None:
    # Leaves of every size, so that those behind them begin anywhere.
    leaves = (torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 2, 2), torch.zeros(1, dtype=torch.int64))
    module = SimpleNamespace(initial_state=lambda batch: (*leaves, (torch.zeros(1, 5, dtype=torch.bfloat16),)))
    here, there = (StateTable(cast(Streaming, module), SLOTS) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(0, 2, (SLOTS, here.row_bytes), generator=generator, dtype=torch.uint8)
    here.unpack(torch.arange(SLOTS), values)
    there.unpack(torch.tensor(slots), here.pack(torch.tensor(slots)))
    for slot in slots:
        assert all(torch.equal(*pair) for pair in zip(here.save(slot), there.save(slot), strict=True))
        assert torch.equal(there.pack(torch.tensor([slot]))[0], values[slot])
    assert here.row_bytes == 3 + 16 + 8 + 10
    assert here.layout == "bool[3] float32[2, 2] int64[] bfloat16[5]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_is_that_of_the_network_and_its_states_alone(dtype: torch.dtype) -> None:
    given = network()
    made = StreamingExecutor(StatefulNetwork(given, CHUNK, SCORES, slots=SLOTS, dtype=dtype), max_rows=SLOTS)
    frames = np.random.default_rng(0).normal(size=(FRAMES, FEATURES)).astype(np.float32)
    result = made.step(batch([(0, frames, True, True)]))
    assert result.length_B is not None
    np.testing.assert_allclose(result.output_B[0, : result.length_B[0]], offline(frames), atol=0.05)
    assert {leaf.dtype for leaf in made.states.save(0)} <= {dtype, torch.int64}
    # The caller's network is left as it was.
    assert given.training
    assert all(own.requires_grad and own.dtype == torch.float32 for own in given.parameters())


def test_another_output_than_the_networks_is_refused() -> None:
    with pytest.raises(ApplicationError, match=r"gives \[4, 2\] for a chunk"):
        StatefulNetwork(network(), CHUNK, TensorSpec(dtype="float32", shape=(2, 2), meaning="x"), slots=2)


@pytest.mark.gpu
def test_exact_answers_are_the_same_bits_in_any_company_by_graphs() -> None:
    assert exact_in_any_company(CudaGraphExecutor, range(5))


def test_exact_answers_are_the_same_bits_in_any_company() -> None:
    # MKL reads what it is asked for when it is loaded, as `penstock serve --exact` asks.
    asked = {"MKL_CBWR": "AVX2,STRICT"}
    command = [sys.executable, "-m", "tests.support.company"]
    said = subprocess.run(command, env=os.environ | asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.stdout == "True\n", said.stderr
