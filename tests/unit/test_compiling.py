"""Compiling beside a model that is served, with a compiler that needs no torch."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from penstock.serve.engine.compiling import Compiling
from penstock.serve.table.costs import Costs
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from tests.support.varying import WORDS


class Batch(NamedTuple):
    rows: int
    ms: float | None
    level: int | None = 0


class Ahead:
    """Gives what a function yields.

    Args:
        make: Makes the batches.
    """

    def __init__(self, make: Callable[[], Iterator[Batch]]) -> None:
        self._make = make
        self.reason, self.unit = "", "batch sizes"
        self.closed = threading.Event()

    def sizes(self, largest: int | list[int]) -> list[int]:
        return [largest, 1] if isinstance(largest, int) else largest

    def batches(self, sizes: list[int]) -> Iterator[Batch]:
        return self._make()

    def close(self) -> None:
        self.closed.set()


class Model:
    """An engine and a table that note what they are given."""

    def __init__(self, costs: Costs | LengthCosts | None = None) -> None:
        self.costs = costs or Costs([1, 4], [1e6, 2e6])
        self.improved: dict[int, float] = {}
        self.described: list[tuple[str, str]] = []

    def improve(self, rows: int, ns: float) -> None:
        self.improved[rows] = ns

    def describe_costs(self) -> str:
        return ""

    def describe(self, runs_by: str, fallback: str) -> None:
        self.described.append((runs_by, fallback))


def compiling(ahead: Ahead, model: Model, **limits: Any) -> Compiling:
    runnable = SimpleNamespace(runs_by="torch in bf16", fallback="", application=SimpleNamespace(name="net"))
    given: tuple[Any, ...] = ahead, model, model, runnable
    return Compiling(*given, **limits)


async def ended(made: Compiling) -> None:
    await asyncio.to_thread(made.join, 10)
    # What the thread has called.
    await asyncio.sleep(0.01)


def test_faster_batches_are_used_and_counted() -> None:
    model = Model()

    async def run() -> None:
        await ended(compiling(Ahead(lambda: iter([Batch(4, 1.0), Batch(1, None)])), model))

    asyncio.run(run())
    assert model.improved == {4: 1_060_000.0}
    assert model.described[0] == ("torch in bf16, 0 of 2 batch sizes compiled so far, 2 to come", "")
    assert model.described[-1] == ("torch in bf16, 1 of 2 batch sizes compiled", "")


def test_compiled_shapes_change_the_costs_of_their_length() -> None:
    grid = LengthGrid.of(WORDS)
    assert grid is not None
    edges = list(grid.edges)
    costs = LengthCosts(grid, [1, 2, 4], [[edge * 1e6, edge * 1.9e6, edge * 3.8e6] for edge in edges], largest=[2] * 7)
    model = Model(costs)
    given = [
        Batch(4, edges[-1] * 1.0, 0),
        Batch(8, edges[-1] * 1.5, 0),  # larger than any that was measured
        Batch(16, 5000.0, 0),  # beyond the budget
        Batch(64, 0.01, 1),  # beyond the engine's memory
        Batch(1, edges[0] * 0.1, len(edges) - 1),
        Batch(2, 0.001, None),
        Batch(2, 0.001, len(edges)),
    ]

    async def run() -> None:
        ahead = Ahead(lambda: iter(given))
        ahead.unit = "shapes"
        await ended(compiling(ahead, model, max_rows=32, max_ns=1e9))

    asyncio.run(run())
    host_ns = 60_000
    assert costs.of(4, edges[-1]) == edges[-1] * 1e6 + host_ns
    assert costs.of(8, edges[-1]) == edges[-1] * 1.5e6 + host_ns
    # Of the other lengths in proportion, and as many rows of shorter ones are worth it.
    assert costs.rows == [1, 2, 4, 8]
    assert costs.at(edges[0]).times_ns[8] == edges[0] * 2 * 3.8e6
    assert costs.largest_L == [8] * 7
    assert costs.of(1, edges[0]) == edges[0] * 1e5 + host_ns
    assert costs.min_compute_L[0] == edges[0] * 1e5 + host_ns
    assert model.described[-1] == ("torch in bf16, 7 of 7 shapes compiled", "")


def test_an_error_is_said_and_ends_the_compiling_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def batches() -> Iterator[Batch]:
        yield Batch(4, 1.0)
        raise RuntimeError("a library failed.")

    async def run() -> None:
        await ended(compiling(Ahead(batches), model))

    asyncio.run(run())
    said, fallback = model.described[-1]
    assert said == "torch in bf16, 1 of 2 batch sizes compiled"
    assert "(RuntimeError: a library failed)" in fallback
    assert "net is not compiled further" in caplog.text


def test_a_model_that_was_unloaded_gets_nothing_more() -> None:
    model = Model()

    async def run() -> None:
        ahead = Ahead(lambda: iter([]))

        def batches() -> Iterator[Batch]:
            ahead.closed.wait(10)
            yield Batch(4, 1.0)

        ahead._make = batches
        made = compiling(ahead, model)
        made.close()
        await ended(made)

    asyncio.run(run())
    assert model.improved == {}
    assert len(model.described) == 1


def test_a_server_that_has_ended_stops_the_compiler() -> None:
    go, ahead = threading.Event(), Ahead(lambda: iter([]))

    def batches() -> Iterator[Batch]:
        go.wait(10)
        yield Batch(4, 1.0)

    ahead._make = batches

    async def run() -> Compiling:
        return compiling(ahead, Model())

    made = asyncio.run(run())
    go.set()
    made.join(10)
    assert ahead.closed.is_set()
