"""Results row by row, as compiled, are those that NumPy writes for a whole batch."""

import numpy as np
import pytest

from penstock.core.spec import TensorSpec
from penstock.runtime.executor import StepOutput
from penstock.serve.engine import results
from penstock.serve.engine.results import ResultColumns
from penstock.serve.table import slots
from penstock.serve.table.slots import SlotTable, TableLayout

NUMBERS = TensorSpec(dtype="float32", shape=(3,), meaning="numbers")
SLOTS, MS = 64, 1_000_000


def written(monkeypatch: pytest.MonkeyPatch, chunks: int, *, compiled: bool) -> SlotTable:
    """Return a table after batches of random rows; some fail, are late, or were cancelled."""
    monkeypatch.setattr(results, "COMPILED", compiled)
    layout = TableLayout(slots=SLOTS, chunks=chunks, input=NUMBERS, output=NUMBERS, frontends=2)
    table = SlotTable.private(layout)
    rng = np.random.default_rng(chunks)
    columns = ResultColumns(table, traced=True, writes_output=True)
    table.arrival_ns[:] = rng.integers(0, 40 * MS, table.arrival_ns.shape)
    table.deadline_ns[:] = table.arrival_ns + 50 * MS
    table.deadline_ns[rng.random(table.deadline_ns.shape) < 0.1] = slots.CANCELLED_NS
    for batch in range(6):
        rows_B = np.flatnonzero(rng.random(SLOTS) < (0.02, 0.5)[batch % 2])
        from_B = rows_B * chunks + table.consumed[rows_B] % chunks
        to_B = rows_B * chunks + table.produced[rows_B] % chunks
        output_B = rng.normal(size=(rows_B.size, 3)).astype(np.float32)
        output_B[rng.random(rows_B.size) < 0.2] = np.nan
        failed_B = rng.random(rows_B.size) < 0.2
        start_ns = 40 * MS + batch * 9 * MS
        busy_B = np.zeros(rows_B.size, np.int64)
        result = StepOutput(output_B=output_B)
        columns.write(rows_B, from_B, to_B, busy_B, result, failed_B, start_ns, start_ns + 7 * MS)
    return table


@pytest.mark.parametrize("chunks", [1, 4])
def test_rows_are_written_and_counted_as_by_numpy(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    one, other = (written(monkeypatch, chunks, compiled=compiled) for compiled in (False, True))
    for column in one.layout.columns():
        np.testing.assert_array_equal(getattr(one, column.name), getattr(other, column.name), column.name)
    # The last count is of late ones.
    assert one.outcomes[[slots.OK, slots.NOT_FINITE, slots.FAILED, -1]].all()
