"""Answers that take steps: tokens a second beside static batches, and tokens that differ from one answer at a time.

The engine runs in this process, with a table and a front-end's writer, without sockets: both ways of batching pay for
the network alone. `python -m benchmarks.acceptance.server.generation --device cuda:0` prints the figures by rows.
"""

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch

from benchmarks.models.translator import MEAN_STEPS, MOST_STEPS, Requests, Translator, app
from penstock.core.errors import BenchError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.slots import SlotTable, TableLayout

SECONDS = 20.0
ROWS = (8, 16, 32, 64)
ROWS_GPU = (32, 64, 128, 256)
SAME_REQUESTS = 64
# The wait for a first output is not limited: all requests are there from the beginning.
FIRST_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """Rate of one way of batching at one batch size.

    Args:
        rows: Rows of a static batch, or the most in progress.
        tokens_a_second: Tokens of the answers; those beyond an answer's end do not count.
        p99_ms: 99th percentile of the time from one token of an answer to its next.
    """

    rows: int
    tokens_a_second: float
    p99_ms: float


@final
@dataclass
class _Received:
    """Tokens of the requests, and the times between them."""

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    gaps_ns: list[int] = field(default_factory=list[int])
    ended: int = 0
    _last_ns: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, number: int, output: Array, last: bool) -> None:
        assert output.size, f"request {number} failed"
        now_ns = time.monotonic_ns()
        if number in self._last_ns:
            self.gaps_ns.append(now_ns - self._last_ns[number])
        self._last_ns[number] = now_ns
        self.tokens.setdefault(number, []).append(int(output[0]))
        self.ended += last


def device_here() -> str:
    """Return the device of the figures: a GPU where there is one."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def vs_static(device: str | None = None) -> list[float]:
    """Return tokens a second over those of static batches whose 99th percentile of a token is no shorter.

    Raises:
        BenchError: No batch size of one way is as fast as one of the other.
    """
    device = device or device_here()
    executor, requests = _executor(device), _records(4096)
    sizes = ROWS if device == "cpu" else ROWS_GPU
    static = [_static(executor, requests, rows) for rows in sizes]
    best = max(static, key=lambda each: each.tokens_a_second)
    ours = [_continuous(executor, requests, rows, best.p99_ms)[0] for rows in sizes]
    as_fast = [each.tokens_a_second for each in ours if each.p99_ms <= best.p99_ms]
    if not as_fast:
        raise BenchError(f"static batches have a 99th percentile of {best.p99_ms:.1f} ms, and none of {ours} has.")
    return [max(as_fast) / best.tokens_a_second]


def sameness(device: str | None = None) -> list[float]:
    """Return the number of tokens that differ from those of the same requests one at a time."""
    executor, requests = _executor(device or device_here()), _records(SAME_REQUESTS)
    _, received = _continuous(executor, requests, 16, 1e6, whole=True)
    differ = 0
    for number, record in enumerate(requests):
        alone = [int(step.output_B[0]) for step in executor.run(record.reshape(1))]
        together = received.tokens[number]
        differ += abs(len(alone) - len(together)) + sum(a != b for a, b in zip(alone, together, strict=False))
    return [float(differ)]


def _executor(device: str) -> GenerationExecutor:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return GenerationExecutor(Translator().eval().to(device), app, device=device)


def _records(count: int) -> Array:
    assert isinstance(app.input, RecordSpec)
    return app.input.of_many(Requests(1)(count))


def _static(executor: GenerationExecutor, requests: Array, rows: int) -> Rate:
    """Batches of rows in the order of arrival, each stepped until its longest answer ends."""
    tokens, steps_s, start_s = 0, [], time.perf_counter()
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        state = executor.begin(batch)
        for _ in range(int(batch["end"].max())):
            step_s = time.perf_counter()
            state = executor.step(state).state
            steps_s.append(time.perf_counter() - step_s)
        tokens += int(batch["end"].sum())
        if time.perf_counter() - start_s > SECONDS:
            break
    return Rate(rows, tokens / (time.perf_counter() - start_s), float(np.percentile(steps_s, 99)) * 1e3)


def _continuous(
    executor: GenerationExecutor, requests: Array, rows: int, step_ms: float, *, whole: bool = False
) -> tuple[Rate, _Received]:
    """The engine with so many rows in progress at most, and requests that always wait."""
    table = SlotTable.private(TableLayout.of(app, slots=2 * rows, frontends=1))
    engine = GenerationEngine(
        executor,
        table,
        first_budget_ns=FIRST_NS,
        step_budget_ns=int(1e6 * step_ms),
        clock_ns=time.monotonic_ns,
        max_rows=rows,
    )
    for _ in engine.measuring(requests[0]):
        pass
    writer = TableWriter(table, budget_ns=FIRST_NS, wake=lambda: None)
    received, waiting = _Received(), deque(enumerate(requests))
    start_s = time.perf_counter()
    while (waiting or received.ended < len(requests)) and (whole or time.perf_counter() - start_s < SECONDS):
        while waiting and writer.in_use < table.slots:
            number, record = waiting.popleft()
            writer.submit(
                record,
                done=lambda status, output, last, number=number: received.take(number, output, last),
                arrival_ns=time.monotonic_ns(),
            )
        engine.tick(time.monotonic_ns())
        writer.collect()
    tokens = sum(map(len, received.tokens.values()))
    p99_ms = float(np.percentile(received.gaps_ns, 99)) / 1e6
    return Rate(engine.costs.max_rows, tokens / (time.perf_counter() - start_s), p99_ms), received


def main(argv: Sequence[str] | None = None) -> None:
    """Print both figures, and the rates by rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=device_here())
    parser.add_argument("--rows", type=int, nargs="*", help="batch sizes")
    parsed = parser.parse_args(argv)
    executor, requests = _executor(parsed.device), _records(4096)
    print(f"mean {requests['end'].mean():.1f} steps of {MEAN_STEPS} drawn, at most {MOST_STEPS}")
    for rows in parsed.rows or (ROWS if parsed.device == "cpu" else ROWS_GPU):
        static = _static(executor, requests, rows)
        ours, _ = _continuous(executor, requests, rows, static.p99_ms)
        print(
            f"static     {static}\ncontinuous {ours}  x{ours.tokens_a_second / static.tokens_a_second:.2f}", flush=True
        )
    print(f"tokens that differ: {sameness(parsed.device)[0]:.0f}")


if __name__ == "__main__":
    main()
