"""Lanes without a GPU: graphs are functions that write their results where the first call put them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.runtime.generation.generation_ahead import AheadExecutor
from penstock.runtime.generation.generation_graphs import CapturedGeneration
from penstock.runtime.generation.generation_lanes import Found, Mark


class LateMark:
    """A mark that is reached at its second query."""

    def __init__(self) -> None:
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 1

    def synchronize(self) -> None:
        self.queries = 2


class HostLanes:
    """The lanes of a CPU: work runs when it is launched."""

    def __init__(self, refuses: Callable[[int], bool] = lambda lane: False) -> None:
        self.device = torch.device("cpu")
        self.refuses = refuses
        self.failed = False
        # The lane that work is in; None for the default stream.
        self.lane: int | None = None

    @contextmanager
    def on(self, lane: int) -> Generator[None]:
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def mark(self, lane: int) -> Mark:
        return LateMark()

    def follow(self, lane: int, mark: Mark) -> None:
        pass

    def host(self, nbytes: int) -> Tensor:
        # What a transfer does not write is found.
        return torch.full((nbytes,), 0x7B, dtype=torch.uint8)

    def rehearse(self, lane: int, run: Callable[[], object]) -> int:
        with self.on(lane):
            run()
        return 1000

    def captured(self, lane: int, run: Callable[[], Found]) -> Callable[[], Found]:
        if self.refuses(lane):
            raise RuntimeError("operation not permitted when stream is capturing")
        with self.on(lane):
            first = run()

        def repeat() -> Found:
            if self.failed:
                raise RuntimeError("CUDA error: an illegal access")
            _copy(first, run())
            return first

        return repeat


def _copy(into: Any, of: Any) -> None:
    if isinstance(into, dict):
        for name, each in of.items():
            # One number for all rows, as a view, is read and not written.
            if 0 in into[name].stride():
                into[name] = into[name].clone()
            into[name].copy_(each)
    elif isinstance(into, Tensor):
        into.copy_(of)


def executor_of(module: nn.Module, application: Application, **options: Any) -> AheadExecutor:
    """An executor that launches steps ahead, with the options of `CapturedGeneration`."""
    return AheadExecutor(application, CapturedGeneration(module, application, **options))
