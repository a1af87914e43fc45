"""A run of a pack over a source, in real time or as fast as it goes."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Generic, Self, TypeVar

import numpy as np

from penstock.device.inbox import Inbox
from penstock.device.run_report import RunReport
from penstock.device.source import Source, T
from penstock.device.source_reader import SourceReader

STALL_TIMEOUT_S = 10.0
# Percentiles are taken over the newest answers, however long the run.
MAX_KEPT = 100_000

R = TypeVar("R")


class DeviceRun(ABC, Generic[T, R]):
    """A run over a source, to be used as a context: iterate over the results, then read the report.

    Args:
        source: Closed at the end.
        inbox: The queue between the source and the network, in real time.
        real_time: Read the source in a thread of its own; otherwise item by item, none dropped.
        stall_timeout_s: In real time, the source is given up after so many seconds without an item.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        source: Source[T],
        inbox: Inbox[T],
        *,
        real_time: bool,
        stall_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._inbox = inbox
        self._clock = clock
        self._start_s, self._start_cpu_s = clock(), time.process_time()
        self._answered = 0
        self._ages_s: deque[float] = deque(maxlen=MAX_KEPT)
        self._models_s: deque[float] = deque(maxlen=MAX_KEPT)
        self._reader: SourceReader[T] | None = None
        if real_time:
            self._reader = SourceReader(source, inbox, clock=clock, stall_timeout_s=stall_timeout_s)
        self._context = self._reader or closing(source)

    def __enter__(self) -> Self:
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    @abstractmethod
    def __iter__(self) -> Iterator[R]:
        """Results in order, until the source ends.

        Raises:
            SourceError: The source failed or stalled.
        """

    def _items(self) -> Iterator[T]:
        return iter(self._reader or self._source.items())

    def _age_s(self, item: T) -> float | None:
        return None if self._reader is None else self._clock() - item.captured_s

    def _count(self, *, age_s: float | None, model_s: float) -> None:
        self._answered += 1
        self._models_s.append(model_s)
        if age_s is not None:
            self._ages_s.append(age_s)

    @property
    def seconds(self) -> float:
        """Time since the run was made."""
        return self._clock() - self._start_s

    def report(self) -> RunReport:
        """Statistics until now."""
        p50, p95 = 1e3 * np.percentile(self._ages_s, (50, 95)) if self._ages_s else (None, None)
        return RunReport(
            answered=self._answered,
            dropped=self._inbox.dropped,
            broken=self._source.failures.count,
            seconds=self.seconds,
            age_p50_ms=None if p50 is None else float(p50),
            age_p95_ms=None if p95 is None else float(p95),
            model_p50_ms=1e3 * float(np.median(self._models_s)) if self._models_s else 0.0,
            cpu_ms=1e3 * (time.process_time() - self._start_cpu_s) / max(self._answered, 1),
            lag_s=self._reader.playback.lag_s if self._reader else 0.0,
        )
