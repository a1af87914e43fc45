"""Threads that load and compile networks beside one that serves, without a GPU."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from penstock.runtime.gpu.capture import capturing, reserved_stream, stream_aside
from penstock.runtime.gpu.precision import computing, libraries_in
from penstock.train.numerics import numerics
from penstock.train.recipe import Recipe


@pytest.fixture(autouse=True)
def restored_flags() -> Generator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    products = torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before
    torch.set_float32_matmul_precision(products)


def test_a_network_keeps_its_precision_while_another_thread_compiles() -> None:
    inside, seen = threading.Event(), list[bool]()

    def compiles() -> None:
        inside.wait()
        with libraries_in("bf16", tuned=True):
            seen.append(bool(torch.backends.cuda.matmul.allow_tf32))

    thread = threading.Thread(target=compiles)
    thread.start()
    with computing("fp32", "cpu"):
        inside.set()
        thread.join(0.2)
        assert thread.is_alive()
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
    thread.join()
    assert seen == [True]


def test_a_training_may_follow_what_a_network_computed_in() -> None:
    """torch raises when it reads a precision that was set both for all backends and for CUDA's products alone."""
    recipe = Recipe(data=cast(Any, None), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, epochs=1)
    for precision in ("bf16", "fp32", "tf32", "fp32"):
        with libraries_in(precision):
            pass
        for trained in ("fp32", "tf32"):
            with numerics(replace(recipe, precision=trained)), libraries_in(precision):
                torch.get_float32_matmul_precision()
            assert torch.get_float32_matmul_precision() == ("highest" if precision == "fp32" else "high")


def test_two_threads_do_not_capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, entered = list[str](), list[str]()

    @contextmanager
    def graph(made: Any, **how: Any) -> Generator[None]:
        assert not running
        running.append(made)
        entered.append(made)
        yield
        running.remove(made)

    def captures(name: Any) -> None:
        with capturing(name, None):
            pass

    monkeypatch.setattr(torch.cuda, "graph", graph)
    other = threading.Thread(target=captures, args=("second",))
    first: Any = "first"
    with capturing(first, None):
        other.start()
        other.join(0.2)
        assert running == ["first"]
    other.join()
    assert entered == ["first", "second"]


def test_a_stream_aside_is_never_the_one_that_graphs_are_captured_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has 32 streams, and hands them out in turn.
    handles = iter([9, 7, 9, 8, 9])

    @dataclass(frozen=True)
    class Stream:
        handle: int

    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Stream(7))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority=0: Stream(next(handles)))
    lane: Any = reserved_stream(device, 0)
    assert lane.stream == Stream(9)
    assert stream_aside(device) == Stream(8)
    # Its model was unloaded.
    del lane
    assert stream_aside(device) == Stream(9)
