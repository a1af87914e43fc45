"""Answers that take steps: tokens a second beside static batches, and tokens that differ from one answer at a time.

The engine runs in this process, with a table and a front-end's writer, without sockets: both ways of batching pay for
the network alone. `python -m benchmarks.acceptance.server.generation --device cuda:0` prints the figures by rows.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from benchmarks.models.translator import MEAN_STEPS, MOST_STEPS, Requests, Translator, app
from penstock.core.errors import BenchError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation.generating import GeneratingAhead, GeneratingInTurn
from penstock.runtime.generation.generation_choice import gpu_executor
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.table import slots
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable, TableLayout

SECONDS = 8.0
ROWS = (8, 16, 32, 64)
ROWS_GPU = (32, 64, 96, 128, 160, 192, 256)
REQUESTS = 4096
SAME_REQUESTS = 64
# The wait for a first output is not limited: all requests are there from the beginning.
FIRST_NS = 3_600_000_000_000

Executor = GeneratingInTurn | GeneratingAhead


@dataclass(frozen=True, slots=True)
class Rate:
    """Rate of one way of batching at one batch size.

    Args:
        rows: Rows of a static batch, or the most in progress.
        tokens_a_second: Tokens of the answers; those beyond an answer's end do not count.
        p99_ms: 99th percentile of the time from one token of an answer to its next.
        p50_ms: Their median.
    """

    rows: int
    tokens_a_second: float
    p99_ms: float
    p50_ms: float


@final
class _Clients:
    """Requests that always wait, put into the slot table and taken out of it by NumPy.

    The static way hands out no tokens one by one, and a loop over them in Python would take longer than a step.

    Args:
        table: The engine's table.
        requests: The requests, used again and again.
    """

    def __init__(self, table: SlotTable, requests: Array) -> None:
        grid = LengthGrid.of(app.input)
        assert grid is not None
        self._table, self._requests, self._length = table, requests, grid.lengths_of(requests)
        self._free = np.arange(table.slots)
        self._request_N = np.zeros(table.slots, np.int64)
        self._last_ns_N = np.zeros(table.slots, np.int64)
        self._read = self.submitted = self.ended = 0
        self._taken: list[tuple[Array, Array, Array]] = []

    def submit(self, most: int | None = None) -> None:
        """Put a request into each free slot, up to so many in all."""
        table, now_ns = self._table, time.monotonic_ns()
        count = self._free.size if most is None else min(self._free.size, most - self.submitted)
        into, self._free = self._free[:count], self._free[count:]
        number = np.arange(self.submitted, self.submitted + count)
        self.submitted += count
        self._request_N[into], self._last_ns_N[into] = number, 0
        table.generation[into] += 1
        table.input[into, 0] = self._requests[number % len(self._requests)]
        table.length[into, 0] = self._length[number % len(self._requests)]
        table.deadline_ns[into, 0], table.arrival_ns[into, 0] = now_ns + FIRST_NS, now_ns
        table.flags[into, 0] = slots.FIRST | slots.LAST
        table.submitted[into] += 1

    def collect(self) -> None:
        """Take all new outputs."""
        table, until, now_ns = self._table, int(self._table.done_count[0]), time.monotonic_ns()
        ring = table.done[0]
        of = ring[np.arange(self._read, until) % ring.size]
        self._read = until
        entry = table.taken[of] % table.results
        assert table.output_length[of, entry].all(), "a request failed"
        gap_ns = np.where(self._last_ns_N[of] > 0, now_ns - self._last_ns_N[of], -1)
        self._taken.append((self._request_N[of], table.output[of, entry], gap_ns))
        self._last_ns_N[of] = now_ns
        table.taken[of] += 1
        last = of[(table.busy[of] == 0) & (table.produced[of] == table.taken[of])]
        self.ended += last.size
        self._free = np.concatenate([self._free, last])

    def tokens(self) -> tuple[Array, Array, Array]:
        """Return the requests and the tokens of all outputs in their order, and the gaps before them, -1 for none."""
        request, token, gap_ns = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        return request, token, gap_ns


def device_here() -> str:
    """Return the device of the figures: a GPU where there is one."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def vs_static(device: str | None = None) -> list[float]:
    """Return tokens a second over those of static batches whose 99th percentile of a token is no shorter.

    Raises:
        BenchError: No batch size of one way is as fast as one of the other.
    """
    device = device or device_here()
    requests = _records(REQUESTS)
    executor = _executor(device, requests)
    # As an engine process does when a model is loaded: collections between the steps are short then.
    gc.collect()
    gc.freeze()
    sizes = ROWS if device == "cpu" else ROWS_GPU
    static = [_said("static", _static(executor, requests, rows, SECONDS)) for rows in sizes]
    best = max(static, key=lambda each: each.tokens_a_second)
    ours = [_said("continuous", _continuous(executor, requests, rows, best.p99_ms, SECONDS)) for rows in sizes]
    as_fast = [each.tokens_a_second for each in ours if each.p99_ms <= best.p99_ms]
    if not as_fast:
        raise BenchError(f"static batches have a 99th percentile of {best.p99_ms:.2f} ms, and none of {ours} has.")
    return [max(as_fast) / best.tokens_a_second]


def _said(way: str, rate: Rate) -> Rate:
    print(f"{way}: {rate}", flush=True)
    return rate


def sameness(device: str | None = None) -> list[float]:
    """Return the number of tokens that differ from those of the same requests one at a time."""
    requests = _records(SAME_REQUESTS)
    executor = _executor(device or device_here(), requests)
    engine, clients = _engine(executor, requests, 16, 1e6)
    while clients.ended < len(requests):
        clients.submit(len(requests))
        engine.tick(time.monotonic_ns())
        clients.collect()
    request, token, _ = clients.tokens()
    differ = 0
    for number, record in enumerate(requests):
        alone = [int(step.output_B[0]) for step in executor.run(record.reshape(1))]
        together = token[request == number].tolist()
        differ += abs(len(alone) - len(together)) + sum(a != b for a, b in zip(alone, together, strict=False))
    return [float(differ)]


def _executor(device: str, requests: Array) -> Executor:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    network = Translator().eval().to(device)
    if device == "cpu":
        return GenerationExecutor(network, app)
    return gpu_executor(network, app, example=requests[0], device=device)


def _records(count: int) -> Array:
    assert isinstance(app.input, RecordSpec)
    return app.input.of_many(Requests(1)(count))


def _static(executor: Executor, requests: Array, rows: int, seconds: float) -> Rate:
    """Batches of rows in the order of arrival, each stepped until its longest answer ends."""
    tokens, steps_s, start_s = 0, [], time.perf_counter()
    for start in range(0, 1 << 30, rows):
        batch = requests[np.arange(start, start + rows) % len(requests)]
        stepping = _stepping(executor, executor.join([executor.begin(batch)]), int(batch["end"].max()))
        step_s = time.perf_counter()
        for _ in stepping:
            now_s = time.perf_counter()
            steps_s.append(now_s - step_s)
            step_s = now_s
        tokens += int(batch["end"].sum())
        if time.perf_counter() - start_s > seconds:
            break
    p50_ms, p99_ms = np.percentile(steps_s, [50, 99]) * 1e3
    return Rate(rows, tokens / (time.perf_counter() - start_s), float(p99_ms), float(p50_ms))


def _stepping(executor: Executor, state: object, steps: int) -> Iterator[None]:
    """Run steps, on a GPU the next one launched before a wait; yield after each."""
    if isinstance(executor, GeneratingInTurn):
        for _ in range(steps):
            state = executor.step(state).state
            yield
        return
    launched = deque([executor.launch(state)])
    for number in range(1, steps + 1):
        if number < steps:
            launched.append(executor.launch(state))
        executor.finish(launched.popleft(), state)
        yield


def _engine(executor: Executor, requests: Array, rows: int, step_ms: float) -> tuple[GenerationEngine, _Clients]:
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
    return engine, _Clients(table, requests)


def _continuous(executor: Executor, requests: Array, rows: int, step_ms: float, seconds: float) -> Rate:
    """The engine with so many rows in progress at most, and requests that always wait."""
    engine, clients = _engine(executor, requests, rows, step_ms)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        clients.submit()
        engine.tick(time.monotonic_ns())
        clients.collect()
    taken_s = time.perf_counter() - start_s
    request, _, gap_ns = clients.tokens()
    p50_ms, p99_ms = np.percentile(gap_ns[gap_ns >= 0], [50, 99]) / 1e6
    return Rate(engine.costs.max_rows, request.size / taken_s, float(p99_ms), float(p50_ms))


def main(argv: Sequence[str] | None = None) -> None:
    """Print both figures, and the rates by rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=device_here())
    parser.add_argument("--rows", type=int, nargs="*", help="batch sizes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each batch size")
    parsed = parser.parse_args(argv)
    requests = _records(REQUESTS)
    executor = _executor(parsed.device, requests)
    print(f"mean {requests['end'].mean():.1f} steps of {MEAN_STEPS} drawn, at most {MOST_STEPS}")
    sizes = parsed.rows or (ROWS if parsed.device == "cpu" else ROWS_GPU)
    static: list[Rate] = []
    for rows in sizes:
        static.append(_static(executor, requests, rows, parsed.seconds))
        print(f"static     {static[-1]}", flush=True)
    best = max(static, key=lambda each: each.tokens_a_second)
    for rows in sizes:
        ours = _continuous(executor, requests, rows, best.p99_ms, parsed.seconds)
        as_fast = "" if ours.p99_ms <= best.p99_ms else ", but a longer p99"
        print(f"continuous {ours}  x{ours.tokens_a_second / best.tokens_a_second:.2f}{as_fast}", flush=True)
    print(f"tokens that differ: {sameness(parsed.device)[0]:.0f}")


if __name__ == "__main__":
    main()
