"""Leaks of state between streams: many short streams over few slots, each compared with the same stream alone."""

import time
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn

from benchmarks.acceptance.server.tick import BUDGET_NS, engine_and_writer
from penstock.core.spec import Array, TensorSpec
from penstock.nn import GRU, CausalConv1d, Lookahead, SequenceBatchNorm, Sequential
from penstock.runtime.streaming_executor import StatefulNetwork, StreamingExecutor
from penstock.serve.frontend.table_writer import SlotHandle
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import LAST, OK, SOFT_DEADLINE, TableLayout

# T frames of a signal, U frames that come of it

STREAMS = 100_000
SLOTS = 64
CHUNKS = 4
SIGNALS = 97
FRAMES, FEATURES = 4, 3
LONGEST = 3 * FRAMES
# Share of streams that are cancelled midway.
CANCELLED = 0.2
NEAR = 1e-5
INPUT = TensorSpec(dtype="float32", shape=(FRAMES, FEATURES), meaning="frames")
OUTPUT = TensorSpec(dtype="float32", shape=(FRAMES + 2, 2), meaning="scores", name="scores")


@final
@dataclass(slots=True)
class _CheckedStream:
    """A stream and its expected outputs."""

    expected_U: Array
    outputs: list[Array]
    slot: SlotHandle
    chunks: list[Array]
    chunks_to_send: int


class LeakCheck:
    """Streams that come and go over a table of few slots; `run` counts those that differ from the stream alone.

    Args:
        seed: Seed of the weights, signals and times.
        kind: `StreamingExecutor`, or `CudaGraphExecutor` on a GPU.
    """

    def __init__(self, seed: int = 0, kind: Any = StreamingExecutor) -> None:
        torch.manual_seed(seed)
        module = Sequential(
            CausalConv1d(FEATURES, 8, 3), SequenceBatchNorm(8), GRU(8, 8), Lookahead(8, 2), nn.Linear(8, 2)
        ).eval()
        self._rng = np.random.default_rng(seed)
        layout = TableLayout(slots=SLOTS, chunks=CHUNKS, input=INPUT, output=OUTPUT)
        device = "cpu" if kind is StreamingExecutor else "cuda"
        executor = kind(StatefulNetwork(module, INPUT, OUTPUT, slots=SLOTS, device=device), max_rows=SLOTS)
        self._engine, self._frontend = engine_and_writer(executor, layout, Costs([1, SLOTS], [1e5, 2e5]))
        lengths = self._rng.integers(1, LONGEST + 1, SIGNALS)
        self._signals = [self._rng.normal(size=(n, FEATURES)).astype(np.float32) for n in lengths]
        with torch.no_grad():
            self._expected = [module(torch.from_numpy(signal)[None])[0].numpy() for signal in self._signals]
        self.wrong = 0
        self.answered = 0
        self._open: dict[int, _CheckedStream] = {}

    def run(self, streams: int) -> int:
        """Open and close a number of streams; return how many differ from the stream alone."""
        opened = 0
        while opened < streams or self._open:
            while opened < streams and len(self._open) < SLOTS:
                self._begin(opened)
                opened += 1
            for number, client in list(self._open.items()):
                if client.chunks_to_send == 0 and client.chunks:
                    self._frontend.cancel(client.slot)
                    del self._open[number]
                elif client.chunks and self._rng.random() < 0.7:
                    self._send(client)
            self._engine.tick(time.monotonic_ns())
            self._frontend.collect()
        return self.wrong

    def _begin(self, number: int) -> None:
        which = int(self._rng.integers(SIGNALS))
        signal = self._signals[which]
        chunks: list[Array] = []
        while sum(map(len, chunks)) < len(signal):
            start = sum(map(len, chunks))
            chunks.append(signal[start : start + int(self._rng.integers(1, FRAMES + 1))])
        outputs: list[Array] = []

        def done(status: int, output: Array, last: bool) -> None:
            assert status == OK, status
            outputs.append(output.reshape(-1, *OUTPUT.shape[1:]).copy())
            if last:
                self._over(number)

        chunks_to_send = int(self._rng.integers(len(chunks))) if self._rng.random() < CANCELLED else len(chunks)
        self._open[number] = _CheckedStream(
            self._expected[which], outputs, self._frontend.open(done), chunks, chunks_to_send
        )

    def _send(self, client: _CheckedStream) -> None:
        if self._frontend.room(client.slot) == 0:
            return
        chunk = client.chunks.pop(0)
        client.chunks_to_send -= 1
        # NaN beyond the chunk's length must not matter.
        padded = np.full(INPUT.shape, np.nan, np.float32)
        padded[: len(chunk)] = chunk
        flags = SOFT_DEADLINE if client.chunks else SOFT_DEADLINE | LAST
        now_ns = time.monotonic_ns()
        self._frontend.push(
            client.slot, padded, deadline_ns=now_ns + BUDGET_NS, arrival_ns=now_ns, flags=flags, length=len(chunk)
        )

    def _over(self, number: int) -> None:
        client = self._open.pop(number)
        given = np.concatenate(client.outputs)
        self.answered += 1
        same = given.shape == client.expected_U.shape and np.abs(given - client.expected_U).max(initial=0.0) <= NEAR
        self.wrong += not same


def leaks() -> list[float]:
    """Return the number of 100,000 streams that differ from the stream alone."""
    return [float(LeakCheck().run(STREAMS))]
