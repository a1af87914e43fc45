"""Whether any stream ever hears what another one said: many short ones through few slots, each compared with itself
alone.
"""

import time
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn

from penstock.core.spec import Array, TensorSpec
from penstock.nn import GRU, CausalConv1d, Lookahead, SequenceBatchNorm, Sequential
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.serve.costs import Costs
from penstock.serve.engine import Engine
from penstock.serve.frontend import Frontend, Ticket
from penstock.serve.slots import LAST, OK, PATIENT, SlotTable, TableLayout

# T frames of a signal, U frames that come of it

STREAMS = 100_000
SLOTS = 64
CHUNKS = 4
SIGNALS = 97
FRAMES, FEATURES = 4, 3
LONGEST = 3 * FRAMES
# Streams that are given up in the middle, of all.
GIVEN_UP = 0.2
NEAR = 1e-5
BUDGET_NS = 10**12
INPUT = TensorSpec(dtype="float32", shape=(FRAMES, FEATURES), meaning="frames")
OUTPUT = TensorSpec(dtype="float32", shape=(FRAMES + 2, 2), meaning="scores", name="scores")


@final
@dataclass(slots=True)
class _Client:
    """A stream and what it must hear."""

    expected_U: Array
    heard: list[Array]
    ticket: Ticket
    left: list[Array]
    stays_for: int


class Leaks:
    """Streams come and go over a table of few slots; `run` counts those that were not answered as if alone.

    Args:
        seed: Of everything.
        kind: `StreamingExecutor`, or `GraphedExecutor` where there is a GPU.
    """

    def __init__(self, seed: int = 0, kind: Any = StreamingExecutor) -> None:
        torch.manual_seed(seed)
        module = Sequential(
            CausalConv1d(FEATURES, 8, 3), SequenceBatchNorm(8), GRU(8, 8), Lookahead(8, 2), nn.Linear(8, 2)
        ).eval()
        self._rng = np.random.default_rng(seed)
        table = SlotTable.private(TableLayout(slots=SLOTS, chunks=CHUNKS, input=INPUT, output=OUTPUT))
        executor = kind(module, INPUT, OUTPUT, slots=SLOTS, max_rows=SLOTS)
        costs = Costs([1, SLOTS], [1e5, 2e5])
        self._engine = Engine(executor, table, budget_ns=BUDGET_NS, clock_ns=time.monotonic_ns, costs=costs)
        self._frontend = Frontend(table, budget_ns=BUDGET_NS, wake=lambda: None)
        lengths = self._rng.integers(1, LONGEST + 1, SIGNALS)
        self._signals = [self._rng.normal(size=(n, FEATURES)).astype(np.float32) for n in lengths]
        with torch.no_grad():
            self._expected = [module(torch.from_numpy(signal)[None])[0].numpy() for signal in self._signals]
        self.wrong = 0
        self.answered = 0
        self._open: dict[int, _Client] = {}

    def run(self, streams: int) -> int:
        """Open and close so many streams; gives how many heard something else than alone."""
        begun = 0
        while begun < streams or self._open:
            while begun < streams and len(self._open) < SLOTS:
                self._begin(begun)
                begun += 1
            for number, client in list(self._open.items()):
                if client.stays_for == 0 and client.left:
                    self._frontend.cancel(client.ticket)
                    del self._open[number]
                elif client.left and self._rng.random() < 0.7:
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
        heard: list[Array] = []

        def done(status: int, output: Array, last: bool) -> None:
            assert status == OK, status
            heard.append(output.reshape(-1, *OUTPUT.shape[1:]).copy())
            if last:
                self._over(number)

        stays_for = int(self._rng.integers(len(chunks))) if self._rng.random() < GIVEN_UP else len(chunks)
        self._open[number] = _Client(self._expected[which], heard, self._frontend.open(done), chunks, stays_for)

    def _send(self, client: _Client) -> None:
        if self._frontend.room(client.ticket) == 0:
            return
        chunk = client.left.pop(0)
        client.stays_for -= 1
        # What is beyond the chunk's length must not matter.
        padded = np.full(INPUT.shape, np.nan, np.float32)
        padded[: len(chunk)] = chunk
        flags = PATIENT if client.left else PATIENT | LAST
        now_ns = time.monotonic_ns()
        self._frontend.push(
            client.ticket, padded, deadline_ns=now_ns + BUDGET_NS, arrival_ns=now_ns, flags=flags, length=len(chunk)
        )

    def _over(self, number: int) -> None:
        client = self._open.pop(number)
        given = np.concatenate(client.heard)
        self.answered += 1
        same = given.shape == client.expected_U.shape and np.abs(given - client.expected_U).max(initial=0.0) <= NEAR
        self.wrong += not same


def leaks() -> list[float]:
    """Of 100,000 streams, how many heard something else than alone."""
    return [float(Leaks().run(STREAMS))]
