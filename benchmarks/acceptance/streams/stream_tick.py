"""Cost of a tick of live streams on a GPU without the network."""

import time

import numpy as np
import torch

from benchmarks.acceptance.server.tick import BUDGET_NS, engine_and_writer
from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec
from penstock.models.speech import SpeechNet
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.streaming_executor import StatefulNetwork
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import FIRST, OK, SOFT_DEADLINE, TableLayout

CHUNK = TensorSpec(dtype="int16", shape=(1280,), meaning="80 ms of sound at 16 kHz: 2,560 bytes", name="sound")
SCORES = TensorSpec(dtype="float32", shape=(4, 32), meaning="scores", name="scores")
CHUNKS = 4
RUNS = 30


def overhead_ms(rows: int, repetitions: int = 5) -> list[float]:
    """Return the milliseconds of a tick minus those of the network alone, one figure for each repetition.

    Each of the streams has one chunk ready. The network alone is its own CUDA graph, with its input on the GPU.

    Raises:
        BenchError: There is no GPU, or a tick did not answer all of its rows.
    """
    if not torch.cuda.is_available():
        raise BenchError("this figure needs a GPU, and torch sees none.")
    return [_overhead_ms(rows) for _ in range(repetitions)]


def _overhead_ms(rows: int) -> float:
    torch.manual_seed(0)
    module = SpeechNet()
    layout = TableLayout(slots=rows, chunks=CHUNKS, input=CHUNK, output=SCORES)
    network = StatefulNetwork(module, CHUNK, SCORES, slots=rows, device="cuda", dtype=torch.bfloat16)
    executor = CudaGraphExecutor(network, max_rows=rows)
    # Costs that never split a batch.
    engine, frontend = engine_and_writer(executor, layout, Costs([1, rows], [1e5, 1e7]))
    answered = 0

    def done(status: int, output: Array, last: bool) -> None:
        nonlocal answered
        answered += status == OK and output.size > 0

    streams = [frontend.open(done) for _ in range(rows)]
    rng = np.random.default_rng(0)
    chunk = rng.normal(0, 3000, CHUNK.shape).astype(np.int16)
    chosen = [streams[index] for index in rng.permutation(rows)]
    times_ms = [_tick_ms(engine, frontend, chosen, chunk, first=run == 0) for run in range(RUNS)]
    if answered != rows * RUNS:
        raise BenchError(f"{RUNS} ticks answered {answered} of {rows * RUNS} chunks.")
    network = StatefulNetwork(module, CHUNK, SCORES, slots=rows, device="cuda", dtype=torch.bfloat16)
    return float(np.median(times_ms[3:])) - _model_ms(network, rows)


def _tick_ms(engine: Engine, frontend: TableWriter, streams: list[SlotHandle], chunk: Array, *, first: bool) -> float:
    now_ns = time.monotonic_ns()
    for stream in streams:
        flags = SOFT_DEADLINE | (FIRST if first else 0)
        frontend.push(stream, chunk, deadline_ns=now_ns + BUDGET_NS, arrival_ns=now_ns, flags=flags)
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    engine.tick(time.monotonic_ns())
    tick_ms = (time.perf_counter_ns() - start) / 1e6
    frontend.collect()
    return tick_ms


def _model_ms(network: StatefulNetwork, rows: int) -> float:
    """The network with gather and scatter of its state, without the table and the host."""
    chunk_BT = torch.randint(-3000, 3000, (rows, *CHUNK.shape), dtype=torch.int16, device="cuda")
    slot_B = torch.randperm(rows, device="cuda")
    length_B = torch.full((rows,), CHUNK.shape[0], device="cuda")
    never_B = torch.zeros(rows, dtype=torch.bool, device="cuda")

    def run() -> None:
        network.step(chunk_BT, slot_B, length_B, never_B, never_B)

    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times_ms: list[float] = []
        for _ in range(RUNS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times_ms.append(begin.elapsed_time(end))
    return float(np.median(times_ms))
