"""The memory of the slot table: columns, offsets, sharing, and the processors that it is for."""

import mmap
import os
from itertools import pairwise

import numpy as np
import pytest

from penstock.core.errors import ServeError
from penstock.core.spec import TensorSpec
from penstock.serve.table import slots as module
from penstock.serve.table.slots import BATCH_EDGES, TIME_EDGES_NS, SlotTable, TableLayout

POINT = TensorSpec(dtype="float32", shape=(3,), meaning="a point")
TOTAL = TensorSpec(dtype="int16", shape=(), meaning="a total")
LAYOUT = TableLayout(slots=12, chunks=2, input=POINT, output=TOTAL, frontends=3, state_bytes=9)


def offsets(table: SlotTable) -> dict[str, int]:
    start = table.submitted.ctypes.data
    return {column.name: getattr(table, column.name).ctypes.data - start for column in LAYOUT.columns()}


def test_columns_have_their_shapes() -> None:
    table = SlotTable.private(LAYOUT)
    assert (table.slots, table.chunks, LAYOUT.slots_each) == (12, 2, 4)
    shapes = {column.name: getattr(table, column.name).shape for column in LAYOUT.columns()}
    assert shapes == {
        **dict.fromkeys(("submitted", "taken", "consumed", "produced", "busy", "generation", "begun"), (12,)),
        **dict.fromkeys(("length", "deadline_ns", "arrival_ns", "flags"), (12, 2)),
        **dict.fromkeys(("output", "output_length", "status", "queue_ns", "compute_ns", "batch_rows"), (12, 2)),
        "input": (12, 2, 3),
        "done": (3, 8),
        "done_count": (3,),
        "held": (3, 8),
        "counts": (3, 24),
        "held_lengths": (3, 4, 8),
        **dict.fromkeys(("cost_rows", "cost_ns"), (1, 16)),
        **dict.fromkeys(
            ("cost_largest", "handling_ns", "min_compute_ns", "other_tables_ns", "other_tables_share"), (1,)
        ),
        **dict.fromkeys(("cost_padded", "uncaptured", "mean_steps", "in_progress"), (1,)),
        **dict.fromkeys(("step_rows", "step_ns"), (16,)),
        "running": (512,),
        "saved": (12,),
        **dict.fromkeys(("state", "restored"), (12, 2)),
        **dict.fromkeys(("first_counts", "step_counts"), (74,)),
        "generated": (3,),
        "batch_counts": (15,),
        **dict.fromkeys(("queue_counts", "compute_counts", "latency_counts"), (74,)),
        "sums": (4,),
        "outcomes": (5,),
    }
    dtypes = {column.name: str(getattr(table, column.name).dtype) for column in LAYOUT.columns()}
    assert (dtypes.pop("input"), dtypes.pop("output"), set(dtypes.values())) == ("float32", "int16", {"int64"})


def test_results_have_a_ring_of_their_own() -> None:
    table = SlotTable.private(TableLayout(slots=4, chunks=1, input=POINT, output=TOTAL, frontends=2, results=50))
    assert (table.input.shape, table.deadline_ns.shape) == ((4, 1, 3), (4, 1))
    assert (table.output.shape, table.status.shape, table.done.shape) == ((4, 50), (4, 50), (2, 100))


def test_columns_share_no_cache_line_and_those_of_a_gpu_no_page() -> None:
    table = SlotTable.private(LAYOUT)
    placed = offsets(table)
    ends = {name: start + getattr(table, name).nbytes for name, start in placed.items()}
    order = sorted(placed, key=placed.__getitem__)
    for before, after in pairwise(order):
        unit = 4096 if {before, after} & {"input", "output"} else 64
        assert placed[after] % 64 == 0
        assert ends[before] <= placed[after] < ends[before] + unit, (before, after)
        assert (ends[before] - 1) // unit < placed[after] // unit, (before, after)
    assert ends[order[-1]] == LAYOUT.nbytes
    assert table.submitted.ctypes.data % 4096 == 0


def test_another_process_maps_the_same_memory() -> None:
    table, descriptor = SlotTable.shared(LAYOUT)
    other = SlotTable.attached(LAYOUT, descriptor)
    table.deadline_ns[11, 1] = 7
    other.outcomes[4] = 9
    assert (other.deadline_ns[11, 1], table.outcomes[4]) == (7, 9)
    assert os.fstat(descriptor).st_size == LAYOUT.nbytes
    assert os.get_inheritable(descriptor) is False
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:penstock-slots")
    os.ftruncate(descriptor, LAYOUT.nbytes + 1)
    with pytest.raises(AssertionError):
        SlotTable.attached(LAYOUT, descriptor)
    os.close(descriptor)


def test_slots_are_divided_evenly() -> None:
    with pytest.raises(AssertionError):
        TableLayout(slots=12, chunks=1, input=POINT, output=TOTAL, frontends=5)


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_processors_that_keep_stores_in_order(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert SlotTable.private(LAYOUT).submitted.sum() == 0


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    with pytest.raises(ServeError, match="x86-64; this is aarch64"):
        SlotTable.private(LAYOUT)
    with pytest.raises(ServeError, match="x86-64; this is aarch64"):
        SlotTable.shared(LAYOUT)


def test_edges_of_the_histograms() -> None:
    assert TIME_EDGES_NS[[0, 1, 4, 72]].tolist() == [50_000, 59_460, 100_000, 50_000 << 18]
    assert len(TIME_EDGES_NS) == 73
    assert BATCH_EDGES.tolist() == [1 << power for power in range(14)]


def test_codes_are_distinct() -> None:
    statuses = [module.OK, module.EXPIRED, module.FAILED, module.NOT_FINITE]
    lost = [module.ENGINE_LOST, module.ONE_ENGINE_LOST, module.CUT, module.LOST_TWICE, module.LOST_OFTEN]
    assert [*statuses, *lost] == list(range(9))
    flags = [module.FIRST, module.LAST, module.SOFT_DEADLINE, module.LOW_PRIORITY, module.RESETS]
    assert flags == [1, 2, 4, 8, 16]
    counts = [module.OFFERED, module.ANSWERED, module.REFUSED, module.TOO_LATE, module.BROKEN, module.INVALID]
    streams = [module.STREAMS_OPEN, module.STREAMS, module.STREAMS_REFUSED, module.STREAMS_ABORTED]
    resumed = [module.RESUMED, module.REPLAYED, module.LOST_OUTGROWN, module.LOST_NO_MEMORY]
    lost_streams = [*resumed, module.LOST_NO_ENGINE, module.LOST_REPEATED]
    beam = [module.BEAM_DECODED, module.BEAM_LATE, module.BEAM_REFUSED, module.BEAM_FAILED, module.BEAM_RESTARTS]
    all_counts = [*counts, *streams, module.CHUNKS, module.RESULTS, module.RETRIED, *lost_streams, *beam]
    assert all_counts == list(range(24))
    assert len(all_counts) <= module.COUNTS
    # A deadline of thirty years ago is not yet a cancellation.
    assert module.CANCELLED_NS // 2 < -30 * 366 * 86_400 * 10**9
    assert np.iinfo(np.int64).min < module.CANCELLED_NS - 2**60


def test_a_buffer_is_mapped_as_it_is() -> None:
    buffer = mmap.mmap(-1, LAYOUT.nbytes)
    table = SlotTable(LAYOUT, buffer)
    table.submitted[0] = 5
    assert buffer[:8] == (5).to_bytes(8, "little")


def test_a_table_says_how_its_network_runs() -> None:
    table = SlotTable.private(LAYOUT)
    assert table.described == ("", "")
    table.describe("torch in bf16", 'some batches run "uncompiled"\n')
    assert table.described == ("torch in bf16", 'some batches run "uncompiled"\n')
    # Too long, and of characters that take several bytes each.
    table.describe("torch", "\u20ac\\" * 5000)
    runs_by, fallback = table.described
    assert runs_by == "torch"
    assert len(fallback) > 300
