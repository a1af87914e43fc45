"""What a tick of live streams on a GPU costs besides the network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec
from penstock.models.speech import SpeechNet
from penstock.runtime.graphed_executor import GraphedExecutor
from penstock.runtime.streaming_executor import JoinedNetwork
from penstock.serve.costs import Costs
from penstock.serve.engine import Engine
from penstock.serve.frontend import Frontend, Ticket
from penstock.serve.slots import FIRST, OK, PATIENT, SlotTable, TableLayout

CHUNK = TensorSpec(dtype="int16", shape=(1280,), meaning="80 ms of sound at 16 kHz: 2,560 bytes", name="sound")
SCORES = TensorSpec(dtype="float32", shape=(4, 32), meaning="scores", name="scores")
CHUNKS = 4
RUNS = 30
BUDGET_NS = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticked:
    """What was measured of a batch size, medians in milliseconds.

    Args:
        rows: Of the batch.
        tick_ms: The whole tick.
        model_ms: The network alone, in a CUDA graph of its own, its input on the GPU.
    """

    rows: int
    tick_ms: float
    model_ms: float


def ticks(
    rows: Sequence[int], *, hidden: int = 2560, layers: int = 5, dtype: torch.dtype = torch.bfloat16
) -> list[Ticked]:
    """Ticks of batches of so many streams, each with one chunk ready.

    Raises:
        BenchError: A tick did not answer all of its rows.
    """
    most = max(rows)
    torch.manual_seed(0)
    module = SpeechNet()
    table = SlotTable.private(TableLayout(slots=most, chunks=CHUNKS, input=CHUNK, output=SCORES))
    executor = GraphedExecutor(module, CHUNK, SCORES, slots=most, max_rows=most, dtype=dtype)
    # Every batch is run whole, whatever its size.
    costs = Costs([1, most], [1e5, 1e7])
    engine = Engine(executor, table, budget_ns=BUDGET_NS, clock_ns=time.monotonic_ns, costs=costs)
    frontend = Frontend(table, budget_ns=BUDGET_NS, wake=lambda: None)
    answered = 0

    def done(status: int, output: Array, last: bool) -> None:
        nonlocal answered
        answered += status == OK and output.size > 0

    streams = [frontend.open(done) for _ in range(most)]
    rng = np.random.default_rng(0)
    chunk = rng.normal(0, 3000, CHUNK.shape).astype(np.int16)
    found: list[Ticked] = []
    for count in rows:
        chosen = [streams[index] for index in rng.permutation(most)[:count]]
        times_ms = [_tick_ms(engine, frontend, chosen, chunk, first=run == 0) for run in range(RUNS)]
        if answered != count * RUNS:
            raise BenchError(f"{RUNS} ticks answered {answered} of {count * RUNS} chunks.")
        answered = 0
        network = JoinedNetwork(module, CHUNK, SCORES, slots=count, device="cuda", dtype=dtype)
        found.append(Ticked(rows=count, tick_ms=float(np.median(times_ms[3:])), model_ms=_model_ms(network, count)))
    return found


def besides_ms(rows: int, repetitions: int = 5) -> list[float]:
    """Milliseconds of a tick of so many streams besides the network, a figure for each repetition.

    Raises:
        BenchError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise BenchError("this figure needs a GPU, and torch sees none.")
    return [found.tick_ms - found.model_ms for _ in range(repetitions) for found in ticks([rows])]


def _tick_ms(engine: Engine, frontend: Frontend, streams: list[Ticket], chunk: Array, *, first: bool) -> float:
    now_ns = time.monotonic_ns()
    for stream in streams:
        flags = PATIENT | (FIRST if first else 0)
        frontend.push(stream, chunk, deadline_ns=now_ns + BUDGET_NS, arrival_ns=now_ns, flags=flags)
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    engine.tick(time.monotonic_ns())
    tick_ms = (time.perf_counter_ns() - start) / 1e6
    frontend.collect()
    return tick_ms


def _model_ms(network: JoinedNetwork, rows: int) -> float:
    """The network and the joining of its states, without the table's rows and without the host."""
    chunk_BT = torch.randint(-3000, 3000, (rows, *CHUNK.shape), dtype=torch.int16, device="cuda")
    slot_B = torch.randperm(rows, device="cuda")
    length_B = torch.full((rows,), CHUNK.shape[0], device="cuda")
    never_B = torch.zeros(rows, dtype=torch.bool, device="cuda")

    def run() -> None:
        network.step(chunk_BT, slot_B, length_B, never_B, never_B)

    with torch.inference_mode():
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
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
