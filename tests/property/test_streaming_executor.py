"""States in one table: streams that come, go and pause in any order, each answered as if it were alone."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ApplicationError
from penstock.core.spec import TensorSpec
from penstock.runtime.executor import Executor
from penstock.runtime.graphed_executor import GraphedExecutor
from penstock.runtime.streaming_executor import StreamingExecutor
from tests.support.company import (
    CHUNK,
    FEATURES,
    FRAMES,
    SCORES,
    SLOTS,
    batch,
    exact_in_any_company,
    executor,
    network,
    offline,
)

ROOT = Path(__file__).parents[2]


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


@given(st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_stream_is_answered_as_if_it_were_alone(seed: int) -> None:
    assert play(executor(), seed) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_every_stream_is_answered_as_if_it_were_alone_by_graphs(seed: int) -> None:
    assert play(executor(GraphedExecutor), seed) < 1e-4


def test_a_stream_is_saved_and_continues_in_another_executor() -> None:
    frames = np.random.default_rng(0).normal(size=(3 * FRAMES, FEATURES)).astype(np.float32)
    here, there = executor(), executor()
    first = here.step(batch([(2, frames[:FRAMES], True, False)]))
    assert first.length_B is not None
    outputs = [first.output_B[0, : first.length_B[0]].copy()]
    there.restore(4, here.saved(2))
    for start, last in ((FRAMES, False), (2 * FRAMES, True)):
        result = there.step(batch([(4, frames[start : start + FRAMES], False, last)]))
        assert result.length_B is not None
        outputs.append(result.output_B[0, : result.length_B[0]].copy())
    np.testing.assert_allclose(np.concatenate(outputs), offline(frames), atol=1e-6)
    assert here.state_bytes == sum(leaf.nbytes for leaf in here.saved(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_is_that_of_the_network_and_its_states_alone(dtype: torch.dtype) -> None:
    given = network()
    made = StreamingExecutor(given, CHUNK, SCORES, slots=SLOTS, max_rows=SLOTS, dtype=dtype)
    frames = np.random.default_rng(0).normal(size=(FRAMES, FEATURES)).astype(np.float32)
    result = made.step(batch([(0, frames, True, True)]))
    assert result.length_B is not None
    np.testing.assert_allclose(result.output_B[0, : result.length_B[0]], offline(frames), atol=0.05)
    assert {leaf.dtype for leaf in made.saved(0)} <= {dtype, torch.int64}
    # The caller's network is left as it was.
    assert given.training
    assert all(own.requires_grad and own.dtype == torch.float32 for own in given.parameters())


def test_another_output_than_the_networks_is_refused() -> None:
    with pytest.raises(ApplicationError, match=r"makes \[4, 2\] of a chunk"):
        StreamingExecutor(network(), CHUNK, TensorSpec(dtype="float32", shape=(2, 2), meaning="x"), slots=2, max_rows=2)


@pytest.mark.gpu
def test_exact_answers_are_the_same_bits_in_any_company_by_graphs() -> None:
    assert exact_in_any_company(GraphedExecutor, range(5))


def test_exact_answers_are_the_same_bits_in_any_company() -> None:
    # MKL reads what it is asked for when it is loaded, as `penstock serve --exact` asks.
    asked = {"MKL_CBWR": "AVX2,STRICT"}
    command = [sys.executable, "-m", "tests.support.company"]
    said = subprocess.run(command, env=os.environ | asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.stdout == "True\n", said.stderr
