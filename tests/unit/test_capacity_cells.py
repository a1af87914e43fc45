"""The simulation of a fleet beside what is known by arithmetic: queues, losses, order of policies, conservation."""

import math

import numpy as np
import pytest

from penstock.bench.capacity.fleet_lanes import Detection, Failures, equal_servers, zone_and_nodes
from penstock.bench.capacity.latency_counts import LatencyCounts
from penstock.bench.capacity.policies import Policy
from penstock.bench.capacity.request_cells import Noise, RequestCells
from penstock.bench.capacity.server_model import CostTables
from penstock.bench.capacity.stream_cells import StreamCells, StreamShape
from penstock.core.errors import BenchError
from penstock.serve.table.costs import Costs

SERVICE_S = 0.02
ONE_BY_ONE = Costs([1], [SERVICE_S * 1e9])
BATCHING = Costs([1, 4, 16], [2.8e6, 5.2e6, 14.8e6])


def exponential(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.exponential(1.0, count)


def mean_s(cells: RequestCells) -> float:
    return cells.counts.mean_s


def one_by_one(
    load: float, policy: Policy = Policy.RANDOM, noise: Noise | None = None, seconds: float = 40.0
) -> RequestCells:
    """16 servers without budgets, in eight lanes."""
    lanes = equal_servers([load / SERVICE_S * 16] * 8, [16] * 8)
    tables = CostTables(ONE_BY_ONE, math.inf)
    return RequestCells(lanes, tables, policy, step_s=0.01, seconds=seconds, warm_s=2.0, noise=noise, seed=3).run()


@pytest.mark.thorough
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_random_arrivals_wait_as_in_m_d_1(load: float) -> None:
    # Pollaczek and Khinchine.
    assert mean_s(one_by_one(load)) == pytest.approx(SERVICE_S * (1 + load / (2 * (1 - load))), rel=0.03)


@pytest.mark.thorough
def test_random_arrivals_wait_as_in_m_m_1() -> None:
    cells = one_by_one(0.7, noise=exponential)
    assert mean_s(cells) == pytest.approx(SERVICE_S / 0.3, rel=0.05)
    assert cells.counts.percentile_s(99) == pytest.approx(SERVICE_S / 0.3 * math.log(100), rel=0.07)
    assert float(cells.busy_s.mean()) / 38 == pytest.approx(0.7, rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [20.0, 100.0])
def test_batches_of_any_size_wait_as_bulk_service_does(rate: float) -> None:
    # Each batch takes all that came during the one before it; one row alone where none came (M/D[1,inf]/1).
    lanes = equal_servers([rate * 16] * 8, [16] * 8)
    tables = CostTables(Costs([1, 64], [SERVICE_S * 1e9] * 2), math.inf)
    cells = RequestCells(lanes, tables, Policy.RANDOM, step_s=0.005, seconds=22.0, warm_s=2.0, seed=1).run()
    came, none = rate * SERVICE_S, math.exp(-rate * SERVICE_S)
    assert mean_s(cells) == pytest.approx(SERVICE_S + came * SERVICE_S / 2 / (came + none), rel=0.005)
    assert cells.rows.sum() / cells.batches.sum() == pytest.approx(came + none, rel=0.01)
    assert cells.busy_s.mean() / 20 == pytest.approx(SERVICE_S / (SERVICE_S + none / rate), rel=0.01)


@pytest.mark.thorough
def test_choosing_by_counts_waits_less() -> None:
    waits = [
        mean_s(one_by_one(0.8, policy, exponential, 8.0))
        for policy in (Policy.RANDOM, Policy.POWER_OF_TWO, Policy.LEAST_OUTSTANDING)
    ]
    assert waits[0] > 1.5 * waits[1] > 1.5 * waits[2], waits


def test_an_idle_server_is_joined_where_there_is_one() -> None:
    idle = mean_s(one_by_one(0.3, Policy.JOIN_IDLE, seconds=6.0))
    assert idle == pytest.approx(SERVICE_S, rel=0.05)
    assert idle < mean_s(one_by_one(0.3, seconds=6.0)) * 0.9


def batching(policy: Policy, *, load: float = 0.8, age_s: float = 0.0, slow: int = 0, seed: int = 0) -> RequestCells:
    lanes = 2
    slowness = np.ones((lanes, 16))
    slowness[:, :slow] = 2.0
    engines = float((1 / slowness[0]).sum())
    made = equal_servers([load * engines * 16 / 0.0148] * lanes, [16] * lanes, slowness_LS=slowness)
    tables = CostTables(BATCHING, 0.05)
    return RequestCells(made, tables, policy, step_s=0.001, seconds=2.0, warm_s=0.5, view_age_s=age_s, seed=seed).run()


@pytest.mark.thorough
def test_old_counts_send_all_to_one_server() -> None:
    fresh, old = batching(Policy.LEAST_OUTSTANDING), batching(Policy.LEAST_OUTSTANDING, age_s=0.05)
    assert fresh.counts.refused_share() == 0
    assert old.counts.refused_share() > 0.05
    assert batching(Policy.POWER_OF_TWO, age_s=0.05).counts.refused_share() < old.counts.refused_share() / 2


def test_predicted_finish_knows_slow_servers() -> None:
    by_count, by_finish = (batching(policy, slow=2) for policy in (Policy.POWER_OF_TWO, Policy.PREDICTED_FINISH))
    assert by_finish.counts.percentile_s(99) < by_count.counts.percentile_s(99)


@pytest.mark.thorough
def test_each_request_is_counted_once() -> None:
    for load in (0.5, 1.5):
        cells = batching(Policy.POWER_OF_TWO, load=load)
        counts = cells.counts
        assert counts.offered.sum() == counts.answered.sum() + counts.refused.sum() + cells.waiting
    assert cells.counts.refused_share() > 0.2


def test_a_second_that_is_no_multiple_of_the_steps_ends_in_time() -> None:
    lanes, tables = equal_servers([2000.0], [4]), CostTables(BATCHING, 0.05)
    cells = RequestCells(lanes, tables, Policy.RANDOM, step_s=0.0035, seconds=1.0, by_second=True).run()
    assert cells.counts.groups == 1
    assert cells.counts.offered.sum() == pytest.approx(2000, rel=0.1)


def test_a_percentile_of_nothing_is_none() -> None:
    counts = LatencyCounts(2, 0.05)
    assert math.isnan(counts.percentile_s(99))
    counts.refuse(np.array([1]))
    assert counts.percentile_s(99) == math.inf
    assert math.isnan(counts.percentile_s(99, answered_only=True))
    assert math.isnan(counts.percentiles_s(99)[0])


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_result() -> None:
    one, same, other = (batching(Policy.PREDICTED_FINISH, seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(one.counts.answered, same.counts.answered)
    assert not np.array_equal(one.counts.answered, other.counts.answered)


@pytest.mark.thorough
def test_answers_of_admitted_requests_keep_the_budget() -> None:
    cells = batching(Policy.POWER_OF_TWO, load=1.5)
    late = cells.counts.answered[:, 201:].sum()
    assert cells.counts.answered.sum() > 10_000
    # The scheduler refuses what can no longer be in time, and batches take what their costs say.
    assert late == 0


def failing(detect_ms: float) -> RequestCells:
    down = zone_and_nodes([12], 3, 1)
    assert down.sum() == 5
    failures = Failures(at_s=1.0, down_LS=down, detection=Detection(detect_ms=detect_ms, connect_ms=10.0))
    lanes = equal_servers([0.4 * 12 * 16 / 0.0148], [12], failures=failures)
    tables = CostTables(BATCHING, 0.05)
    return RequestCells(lanes, tables, Policy.POWER_OF_TWO, step_s=0.001, seconds=4.0, by_second=True).run()


@pytest.mark.thorough
def test_what_stays_answers_when_a_zone_is_lost() -> None:
    cells = failing(200.0)
    counts = cells.counts
    assert counts.offered.sum() == counts.answered.sum() + counts.refused.sum() + cells.waiting
    served = cells.rows.reshape(12)
    down = zone_and_nodes([12], 3, 1)[0]
    # Five servers worked for one second, the others for four.
    assert served[down].max() < served[~down].min()
    before, _, after, _ = counts.percentiles_s(99)
    assert before < after <= 0.05
    assert counts.refused[2:].sum() == 0


@pytest.mark.thorough
def test_detection_that_is_slower_refuses_more() -> None:
    assert failing(50.0).counts.refused.sum() < failing(800.0).counts.refused.sum()


def erlang_b(servers: int, offered: float) -> float:
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked


def streams(
    rate: float, limit: int, *, seconds: float = 20.0, chunk_costs: Costs = BATCHING, **more: object
) -> StreamCells:
    lanes = equal_servers([rate] * 4, [4] * 4, **more)
    shape = StreamShape(chunk_s=0.08, stream_s=2.0, limit=limit)
    tables = CostTables(chunk_costs, 0.05)
    return StreamCells(lanes, tables, shape, Policy.LEAST_OUTSTANDING, step_s=0.01, seconds=seconds, warm_s=2.0).run()


@pytest.mark.thorough
def test_streams_are_refused_as_in_erlangs_loss_formula() -> None:
    # A stream takes its place at once and holds it for two seconds: M/G/c/c over all servers of a lane.
    cells = streams(rate=20.0, limit=10, seconds=100.0)
    refused = cells.streams.refused.sum() / cells.streams.offered.sum()
    assert refused == pytest.approx(erlang_b(40, 40.0), rel=0.12)


def test_a_stream_that_is_refused_has_no_result_for_any_chunk() -> None:
    cells = streams(rate=40.0, limit=10, seconds=22.0)
    refused = cells.streams.refused.sum()
    assert refused > 0.3 * cells.streams.offered.sum()
    # 25 chunks in two seconds; those that are admitted are all answered.
    assert cells.counts.refused.sum() == 25 * refused
    assert cells.counts.percentile_s(99) == math.inf


@pytest.mark.thorough
def test_each_chunk_is_counted_once() -> None:
    cells = streams(rate=400.0, limit=1000)
    counts = cells.counts
    assert abs(counts.offered.sum() - counts.answered.sum() - counts.refused.sum()) <= cells.waiting
    # 25 chunks of each stream in two seconds.
    assert counts.offered.sum() == pytest.approx(4 * 400 * 25 * 18, rel=0.02)
    assert cells.open.sum() == pytest.approx(4 * 400 * 2, rel=0.06)


def test_a_chunk_that_waits_alone_takes_what_a_batch_costs() -> None:
    cells = streams(rate=0.5, limit=1000, seconds=60.0)
    assert cells.counts.percentile_s(50) == pytest.approx(0.0028, abs=0.0003)


def test_interrupted_streams_come_back_elsewhere() -> None:
    down = np.zeros((4, 4), bool)
    down[:, 0] = True
    failures = Failures(at_s=3.0, down_LS=down, detection=Detection(detect_ms=100.0, reconnect_ms=200.0))
    cells = streams(rate=100.0, limit=1000, seconds=8.0, failures=failures)
    assert cells.open[:, 0].sum() == 0
    assert cells.open.sum(1) == pytest.approx(np.full(4, 200), rel=0.2)
    assert cells.interrupted == pytest.approx(np.full(4, 50), rel=0.4)
    counts = cells.counts
    assert abs(counts.offered.sum() - counts.answered.sum() - counts.refused.sum()) <= cells.waiting
    # About 300 ms of chunks are lost with each.
    assert cells.counts.refused.sum() == pytest.approx(cells.interrupted.sum() * 0.3 / 0.08, rel=0.35)


def test_streams_that_are_too_long_for_the_memory_are_refused() -> None:
    lanes = equal_servers([1.0], [1])
    shape = StreamShape(chunk_s=0.08, stream_s=1e8, limit=1)
    with pytest.raises(BenchError, match="give utterances of at most 2e"):
        StreamCells(lanes, CostTables(BATCHING, 0.05), shape, Policy.RANDOM, step_s=0.01, seconds=1.0)


def test_a_chunk_that_is_no_multiple_of_a_step_is_refused() -> None:
    lanes = equal_servers([1.0], [1])
    shape = StreamShape(chunk_s=0.08, stream_s=2.0, limit=1)
    with pytest.raises(BenchError, match="80 ms is no multiple of the step, 30 ms"):
        StreamCells(lanes, CostTables(BATCHING, 0.05), shape, Policy.RANDOM, step_s=0.03, seconds=1.0)
