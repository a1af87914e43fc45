"""Compiling beside a model that is served, with a compiler that needs no torch."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from penstock.serve.engine.compiling import Compiling
from penstock.serve.table.costs import Costs


class Batch(NamedTuple):
    rows: int
    ms: float | None


class Ahead:
    """Gives what a function yields.

    Args:
        make: Makes the batches.
    """

    def __init__(self, make: Callable[[], Iterator[Batch]]) -> None:
        self._make = make
        self.reason = ""
        self.closed = threading.Event()

    def sizes(self, largest: int) -> list[int]:
        return [largest, 1]

    def batches(self, sizes: list[int]) -> Iterator[Batch]:
        return self._make()

    def close(self) -> None:
        self.closed.set()


class Model:
    """An engine and a table that note what they are given."""

    def __init__(self) -> None:
        self.costs = Costs([1, 4], [1e6, 2e6])
        self.improved: dict[int, float] = {}
        self.described: list[tuple[str, str]] = []

    def improve(self, rows: int, ns: float) -> None:
        self.improved[rows] = ns

    def describe_costs(self) -> str:
        return ""

    def describe(self, runs_by: str, fallback: str) -> None:
        self.described.append((runs_by, fallback))


def compiling(ahead: Ahead, model: Model) -> Compiling:
    runnable = SimpleNamespace(runs_by="torch in bf16", fallback="", application=SimpleNamespace(name="net"))
    given: tuple[Any, ...] = ahead, model, model, runnable
    return Compiling(*given)


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
