"""States of live streams that are read from a GPU and written there, in one gather and one copy."""

import numpy as np
import pytest
import torch

from penstock.runtime.executor import StepInput
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.streaming_executor import StatefulNetwork, StreamingExecutor
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.slots import FIRST, RESTORES, SAVES, SOFT_DEADLINE, SlotTable, TableLayout
from tests.support.company import CHUNK, FEATURES, FRAMES, SCORES, SLOTS, executor, network, offline, several_saved

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

CHUNKS = 6


def test_several_states_are_read_and_written_at_once() -> None:
    several_saved(CudaGraphExecutor)


def test_a_state_of_a_gpu_goes_on_on_a_cpu() -> None:
    frames = np.random.default_rng(4).normal(size=(2, FRAMES, FEATURES)).astype(np.float32)
    here = executor(CudaGraphExecutor)
    there = StreamingExecutor(StatefulNetwork(network(), CHUNK, SCORES, slots=SLOTS), max_rows=SLOTS)
    assert here.state_layout == there.state_layout
    slots_B, lengths_B = np.array([3]), np.array([FRAMES])

    def step(made: CudaGraphExecutor | StreamingExecutor, part: int) -> np.ndarray:
        fresh_B, last_B = np.array([part == 0]), np.array([part == 1])
        batch = StepInput(
            slots_B=slots_B, chunk_B=frames[part][None], length_B=lengths_B, fresh_B=fresh_B, last_B=last_B
        )
        result = made.step(batch)
        assert result.length_B is not None
        return result.output_B[0, : result.length_B[0]].copy()

    outputs = [step(here, 0)]
    there.write_states(slots_B, here.finish_read(here.begin_read(slots_B)))
    outputs.append(step(there, 1))
    np.testing.assert_allclose(np.concatenate(outputs), offline(frames.reshape(-1, FEATURES)), atol=1e-4)


def test_states_are_those_after_their_chunks_though_later_ones_are_under_way() -> None:
    """Several chunks of each stream are begun at once in a table that the GPU reads; each second one is saved."""
    signals = np.random.default_rng(5).normal(size=(SLOTS, CHUNKS, FRAMES, FEATURES)).astype(np.float32)
    made = executor(CudaGraphExecutor)
    layout = TableLayout(slots=SLOTS, chunks=CHUNKS, input=CHUNK, output=SCORES, state_bytes=made.state_bytes)
    table = SlotTable.private(layout)
    now_ns = [1]

    def clock() -> int:
        now_ns[0] += 1
        return now_ns[0]

    engine = Engine(made, table, budget_ns=10**9, clock_ns=clock)
    frontend = TableWriter(table, budget_ns=10**9, wake=lambda: None)

    def open_streams() -> list[SlotHandle]:
        return [frontend.open(lambda status, output, last: None) for _ in range(SLOTS)]

    def put(handles: list[SlotHandle], chunk: int, flags: int) -> None:
        for number, handle in enumerate(handles):
            assert frontend.push(
                handle,
                signals[number, chunk].tobytes(),
                deadline_ns=now_ns[0] + 10**9,
                arrival_ns=now_ns[0],
                flags=flags | SOFT_DEADLINE,
            )

    def run() -> None:
        while (table.submitted != table.consumed).any():
            engine.tick(clock())

    handles = open_streams()
    for chunk in range(CHUNKS - 2):
        put(handles, chunk, FIRST * (chunk == 0) | SAVES * (chunk == 1))
    run()
    torch.cuda.synchronize()
    # The next batch finds that the copy is done.
    put(handles, CHUNKS - 2, 0)
    run()
    assert (table.saved == 2).all()
    states = [table.state[handle.slot].copy() for handle in handles]
    for handle in handles:
        frontend.cancel(handle)
    frontend.collect()
    others = open_streams()
    for handle, state in zip(others, states, strict=True):
        frontend.restore_state(handle, state.view(np.uint8)[: made.state_bytes].tobytes())
    for chunk in range(2, CHUNKS):
        put(others, chunk, RESTORES * (chunk == 2))
    before = table.produced.copy()
    run()
    for number, handle in enumerate(others):
        expected = offline(signals[number].reshape(-1, FEATURES))
        found: list[np.ndarray] = []
        for entry in range(before[handle.slot], table.produced[handle.slot]):
            at = entry % CHUNKS
            count = table.output_length[handle.slot, at] // 2
            found.append(table.output[handle.slot, at, :count].copy())
        outputs = np.concatenate(found)
        # The first two chunks gave the frames before these.
        end = len(expected) - 2
        np.testing.assert_allclose(outputs, expected[end - len(outputs) : end], atol=1e-4)
