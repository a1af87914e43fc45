"""Run a pack over rows of numbers or texts, one after the other."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.device.device_run import STALL_TIMEOUT_S, DeviceRun
from penstock.device.inbox import Inbox
from penstock.device.pack_engine import PackEngine
from penstock.device.table_source import GivenRow, TableSource


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """An input and its answer.

    Args:
        row: The input.
        outputs: The outputs by name, without a batch dimension.
        text: The text of the answer, where the pack makes one.
        model_s: Time of the network alone.
    """

    row: GivenRow
    outputs: dict[str, Array]
    text: str | None
    model_s: float


@final
class RowRun(DeviceRun[GivenRow, RowResult]):
    """Run a pack over rows; none is dropped, and those that the network does not take are listed.

    Args:
        engine: The pack.
        source: Closed at the end.
        clock: Monotonic seconds.
    """

    def __init__(
        self, engine: PackEngine, source: TableSource, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine = engine
        super().__init__(source, Inbox(), real_time=False, stall_timeout_s=STALL_TIMEOUT_S, clock=clock)

    def __iter__(self) -> Iterator[RowResult]:
        """Results in order, until the source ends."""
        for row in self._items():
            start_s = self._clock()
            try:
                outputs, text = self._answer(row)
            except RequestError as error:
                self._source.failures.add(f"{self._source.name}, line {row.line}: {error}")
                continue
            model_s = self._clock() - start_s
            self._count(age_s=None, model_s=model_s)
            yield RowResult(row=row, outputs=outputs, text=text, model_s=model_s)

    def _answer(self, row: GivenRow) -> tuple[dict[str, Array], str | None]:
        if not isinstance(row.given, str):
            return self._engine.predict(row.given), None
        if self._engine.pack.reply is None:
            return self._engine.predict_text(row.given), None
        return {}, "".join(self._engine.generate_text(row.given))
