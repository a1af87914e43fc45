"""Answers that take steps on a GPU: the tokens of one answer at a time, whoever joins and leaves."""

import time

import numpy as np
import pytest
import torch

from benchmarks.models.translator import Requests, Translator, app
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.slots import SlotTable, TableLayout

pytestmark = pytest.mark.gpu

REQUESTS = 40


@pytest.fixture(scope="module")
def executor() -> GenerationExecutor:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return GenerationExecutor(Translator().eval().to("cuda:0"), app, max_rows=16, device="cuda:0")


def test_rows_that_join_and_leave_have_the_tokens_of_one_answer_at_a_time(executor: GenerationExecutor) -> None:
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


def test_the_answers_on_a_gpu_are_those_on_a_cpu(executor: GenerationExecutor) -> None:
    assert isinstance(app.input, RecordSpec)
    requests = app.input.of_many(Requests(4)(8))
    torch.manual_seed(0)
    on_cpu = GenerationExecutor(Translator().eval(), app).predict(requests)
    on_gpu = executor.predict(requests)
    assert np.array_equal(on_cpu["steps"], on_gpu["steps"])
    # Random weights give scores that are nearly equal here and there.
    assert np.mean(on_cpu["output"] == on_gpu["output"]) > 0.99
