"""The batches that the simulation chooses for many servers are those of the scheduler."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.capacity.batch_choice import choose_batches
from penstock.bench.capacity.server_model import CostTables
from penstock.serve.engine.scheduler import Columns, schedule
from penstock.serve.table.costs import Costs

CURVES = (
    Costs([1], [1000.0]),
    Costs([1, 4, 8], [100.0, 200.0, 400.0], min_compute_ns=80.0),
    Costs([1, 2, 4, 8, 16], [500.0, 520.0, 900.0, 1000.0, 2200.0], handling_ns=10.0),
)
NOW_NS = 10_000


def scheduled(slack_ns: list[int], costs: Costs) -> tuple[int, int]:
    """Rows that expire, and rows that run, in the order of their deadlines."""
    zeros = np.zeros(len(slack_ns), np.int64)
    deadline = NOW_NS + np.array(slack_ns, np.int64).reshape(-1, 1)
    columns = Columns(zeros + 1, zeros, zeros, zeros, zeros, deadline, zeros.reshape(-1, 1))
    chosen = schedule(columns, NOW_NS, costs)
    expire, run = sorted(chosen.expire.tolist()), sorted(chosen.run.tolist())
    assert expire + run == list(range(len(expire) + len(run)))
    return len(expire), len(run)


@given(st.sampled_from(CURVES), st.lists(st.lists(st.integers(-500, 9000), max_size=40), min_size=1, max_size=6))
def test_many_servers_choose_as_the_scheduler_does(costs: Costs, slacks: list[list[int]]) -> None:
    tables = CostTables(costs, 1e-5)
    width = max([1, *map(len, slacks)])
    # Whole nanoseconds on both sides: sums of seconds would round apart.
    tables.batch_s = np.array([0.0, *(float(costs.of(rows)) for rows in range(1, costs.largest + 1))])
    tables.min_compute_s = float(costs.min_compute_ns)
    slack = np.full((len(slacks), width), np.inf)
    for place, listed in enumerate(slacks):
        slack[place, : len(listed)] = sorted(listed)
    chosen = choose_batches(slack, np.array([len(listed) for listed in slacks]), tables)
    expected = [scheduled(sorted(listed), costs) for listed in slacks]
    assert list(zip(chosen.expire.tolist(), chosen.run.tolist(), strict=True)) == expected
