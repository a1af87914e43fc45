"""Each network runs with the CPU threads that were chosen for it, whichever thread loaded it and whichever runs it."""

from collections.abc import Generator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec
from penstock.runtime.executor import Executor, StepInput
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.runtime.torch_executor import TorchExecutor
from tests.support.generating import COUNTER, Counter, digits

NUMBERS = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers")


class Watched(nn.Module):
    """Notes the threads with which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def forward(self, chunk_B: Tensor) -> Tensor:
        self.threads.append(torch.get_num_threads())
        return chunk_B


@pytest.fixture(autouse=True)
def _threads_as_before() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def run(executor: Executor) -> None:
    ones = np.ones(1, np.int64)
    executor.step(
        StepInput(slots_B=np.arange(1), chunk_B=np.zeros((1, 2), np.float32), length_B=ones, fresh_B=ones > 0)
    )


def test_a_choice_of_another_thread_holds_in_this_one_and_for_its_network_alone() -> None:
    first, second = Watched(), Watched()
    executors = [TorchExecutor(network, NUMBERS, NUMBERS) for network in (first, second)]

    def load() -> None:
        for threads, executor in enumerate(executors, start=1):
            executor.threads = threads
            run(executor)

    loading = Thread(target=load)
    loading.start()
    loading.join()
    assert torch.get_num_threads() == 3
    for executor in (*executors, *executors):
        run(executor)
    assert (first.threads, second.threads) == ([1, 1, 1], [2, 2, 2])


def test_without_a_choice_they_stay_as_they_are() -> None:
    network = Watched()
    run(TorchExecutor(network, NUMBERS, NUMBERS))
    assert network.threads == [3]


def test_steps_of_an_answer_use_them_too() -> None:
    threads: list[int] = []

    class WatchedCounter(Counter):
        def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
            threads.append(torch.get_num_threads())
            return super().begin(digits, seed)

        def step(self, state: dict[str, Tensor]) -> Any:
            threads.append(torch.get_num_threads())
            torch.set_num_threads(3)
            return super().step(state)

    executor = GenerationExecutor(WatchedCounter(), COUNTER)
    executor.threads = 2
    assert isinstance(COUNTER.input, RecordSpec)
    steps = list(executor.run(COUNTER.input.of_many([digits(9, 1)])))
    assert threads == [2] * (1 + len(steps))
