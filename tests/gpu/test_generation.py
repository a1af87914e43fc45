"""Answers that take steps on a GPU: the tokens of one answer at a time, whoever joins and leaves."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.translator import Requests, Translator, app
from penstock.apps.translate.app import app as translate
from penstock.apps.translate.model import translator
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation.generation_ahead import AheadExecutor
from penstock.runtime.generation.generation_choice import gpu_executor
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.slots import SlotTable, TableLayout

pytestmark = pytest.mark.gpu

REQUESTS = 40


def record(number: int) -> Array:
    assert isinstance(app.input, RecordSpec)
    return app.input.of_many(Requests(5)(number + 1))[number]


def made(network: nn.Module) -> GenerationExecutor | AheadExecutor:
    return gpu_executor(network.eval().to("cuda:0"), app, example=record(0), device="cuda:0", max_rows=16)


@pytest.fixture(scope="module")
def executor() -> AheadExecutor:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    executor = made(Translator())
    assert isinstance(executor, AheadExecutor), "its steps are captured"
    return executor


class Synchronizing(Translator):
    """The same; its step waits for the host, which a CUDA graph cannot."""

    def step(self, state: dict[str, Tensor]) -> Any:
        output, after, done = super().step(state)
        return output + int(done.sum()) * 0, after, done


class SynchronizingBegin(Translator):
    """The same, in `begin` alone."""

    def begin(self, source_ids: Tensor, end: Tensor, source: Tensor) -> dict[str, Tensor]:
        assert int(source.min()) >= 0
        return super().begin(source_ids, end, source)


@pytest.mark.parametrize(("network", "says"), [(Synchronizing, "steps"), (SynchronizingBegin, "begins")])
def test_a_network_that_cannot_be_captured_runs_without_graphs_and_is_named(
    executor: AheadExecutor, network: type[Translator], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    other = made(network())
    assert isinstance(other, AheadExecutor) == (network is SynchronizingBegin)
    assert f"translator {says} without CUDA graphs" in caplog.text
    requests = np.stack([record(number) for number in range(6)])
    assert np.array_equal(other.predict(requests), executor.predict(requests))


def test_rows_that_join_and_leave_have_the_tokens_of_one_answer_at_a_time(executor: AheadExecutor) -> None:
    assert isinstance(app.input, RecordSpec)
    requests = app.input.of_many(Requests(3)(REQUESTS))
    table = SlotTable.private(TableLayout.of(app, slots=REQUESTS, frontends=1))
    budget_ns = 600_000_000_000
    engine = GenerationEngine(
        executor, table, first_budget_ns=budget_ns, step_budget_ns=budget_ns, clock_ns=time.monotonic_ns
    )
    for _ in engine.measuring(requests[0]):
        pass
    writer = TableWriter(table, budget_ns=budget_ns, wake=lambda: None)
    tokens: dict[int, list[int]] = {number: [] for number in range(REQUESTS)}

    def submit(number: int) -> None:
        def done(status: int, output: Array, last: bool) -> None:
            tokens[number].append(int(output[0]))

        writer.submit(requests[number], done=done, arrival_ns=time.monotonic_ns())

    for number in range(REQUESTS):
        submit(number)
        engine.tick(time.monotonic_ns())
        writer.collect()
    while engine.tick(time.monotonic_ns()).run.size:
        writer.collect()
    assert [len(each) for each in tokens.values()] == requests["end"].tolist()
    alone = [[int(step.output_B[0]) for step in executor.run(record.reshape(1))] for record in requests]
    assert list(tokens.values()) == alone


def test_the_answers_on_a_gpu_are_those_on_a_cpu(executor: AheadExecutor) -> None:
    assert isinstance(app.input, RecordSpec)
    requests = app.input.of_many(Requests(4)(8))
    torch.manual_seed(0)
    on_cpu = GenerationExecutor(Translator().eval(), app).predict(requests)
    on_gpu = executor.predict(requests)
    assert np.array_equal(on_cpu["steps"], on_gpu["steps"])
    # Random weights give scores that are nearly equal here and there.
    assert np.mean(on_cpu["output"] == on_gpu["output"]) > 0.99


def test_the_application_translate_runs_in_graphs_with_the_answers_of_its_network_without() -> None:
    assert isinstance(translate.input, RecordSpec)
    rng = np.random.default_rng(3)
    given = [{"tokens": rng.integers(3, 7000, length)} for length in (1, 9, 30, 31, 64, 200)]
    chunks = translate.input.of_many(given)
    torch.manual_seed(0)
    network = translator().eval().to("cuda:0")
    graphs = gpu_executor(network, translate, example=chunks[0], device="cuda:0", max_rows=8)
    assert isinstance(graphs, AheadExecutor)
    found, plain = (each.predict(chunks) for each in (graphs, GenerationExecutor(network, translate, device="cuda:0")))
    assert np.array_equal(found["steps"], plain["steps"])
    assert np.mean(found["token"] == plain["token"]) > 0.98
