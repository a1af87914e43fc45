"""A fleet's plan: demand of a day, servers by resource, failures, files, and options that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.bench.capacity import sizing
from penstock.bench.capacity.capacity_run import CapacitySettings, capacity_record, run_capacity
from penstock.bench.capacity.compared_policies import compare_policies
from penstock.bench.capacity.day import simulate_day
from penstock.bench.capacity.demand import DAY_S, Demand
from penstock.bench.capacity.fleet_file import PICTURES, SPEECH, read_fleet
from penstock.bench.capacity.fleet_lanes import Detection, zone_and_nodes
from penstock.bench.capacity.fleet_service import Conditions, Service
from penstock.bench.capacity.policies import AgedViews, Balancer, Policy, ServerViews, aged_views
from penstock.bench.capacity.server_model import CostTables, ServerModel
from penstock.bench.capacity.sizing import Outage, bounds_of, failing_lanes, plan
from penstock.cli import build
from penstock.core.errors import BenchError
from penstock.serve.frontend.admission import admits

SLOW = ServerModel(rows=(1, 4, 16), ms=(2.8, 5.2, 14.8), message_bytes=1000, frontend_us=100.0, frontend_cores=2)
SMALL = Demand(users=2e5, utterances=0, pictures=100, peak=2.0)


def service(**more: object) -> Service:
    return Service(**({"name": "pictures", "server": SLOW, "latency_ms": 50.0, "peak_rate": 5000.0} | more))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("peak", [1.0, 1.5, 3.0, 20.0, 90.0])
def test_the_rate_of_a_day_has_the_mean_and_the_peak_that_are_asked_for(peak: float) -> None:
    demand = Demand(peak=peak, peak_hour=20)
    share = demand.share_of_peak(np.arange(0, DAY_S, 10.0))
    assert share.max() == pytest.approx(1.0)
    assert share.mean() == pytest.approx(1 / peak, rel=0.01)
    assert demand.share_of_peak(np.array([20 * 3600.0]))[0] == pytest.approx(1.0)


def test_the_rates_of_300_million_users() -> None:
    demand = Demand()
    assert demand.picture_rate == pytest.approx(600e6 / DAY_S * 3)
    assert demand.utterance_rate * demand.utterance_s == pytest.approx(156_250)
    assert demand.requests == 1.5e9


def test_predictions_are_those_of_the_costs() -> None:
    costs = SLOW.costs(50.0)
    tables = CostTables(costs, 0.05)
    for waiting in (0, 1, 15, 16, 40):
        assert tables.predicted_s(np.array([waiting]))[0] == costs.finish_ns(waiting) / 1e9
    assert tables.batch_s[7] == costs.of(7) / 1e9


def test_sizes_that_an_engine_would_not_use_are_left_out() -> None:
    assert SLOW.costs(50.0).rows == [1, 4, 16]
    # Half the budget at most, and more rows a second than smaller ones.
    assert SLOW.costs(20.0).rows == [1, 4]
    assert replace(SLOW, ms=(2.8, 5.2, 21.0)).costs(50.0).rows == [1, 4]
    with pytest.raises(BenchError, match=r"takes 2\.8 ms for one row, more than the latency budget of 1 ms"):
        SLOW.costs(1.0)


def test_the_limit_of_streams_is_that_of_admission_control() -> None:
    tables = CostTables(SPEECH.costs(50.0), 0.05)
    limit = tables.stream_limit(0.08)
    assert admits(limit, 0.08, tables.costs, 50_000_000)
    assert not admits(limit + 1, 0.08, tables.costs, 50_000_000)


def test_servers_by_resource_carry_the_peak_with_what_stays() -> None:
    outage = Outage(zones=3, nodes=2)
    bounds = bounds_of(service(), outage, Conditions())
    # 16 rows in 14.8 ms; 0.7 of two cores at 100 us.
    assert bounds["engine"] == next(n for n in range(99) if outage.survivors(n) * 16 / 0.0148 >= 5000)
    assert bounds["front-ends"] == next(n for n in range(99) if outage.survivors(n) * 14_000 >= 5000)
    assert bounds_of(service(), outage, Conditions(slow=1.0))["engine"] > bounds["engine"]


def test_a_zone_and_nodes_of_others_fail() -> None:
    down = zone_and_nodes([9, 4], 3, 2)
    assert down[0].tolist() == [True, True, True, True, False, False, True, False, False]
    assert down[1, :4].tolist() == [True, True, True, False]
    assert not zone_and_nodes([3], 1, 0).any()
    assert zone_and_nodes([1], 1, 5).sum() == 0
    for servers in range(1, 40):
        assert (~zone_and_nodes([servers], 3, 2)[0]).sum() == max(Outage(zones=3, nodes=2).survivors(servers), 1)


def test_old_views_are_as_old_as_said() -> None:
    views = AgedViews(2)
    seen = [
        int(views.update(ServerViews(np.full((1, 1), step), np.zeros((1, 1)))).outstanding[0, 0]) for step in range(6)
    ]
    assert seen == [0, 0, 0, 1, 2, 3]


def test_views_that_do_not_fit_into_memory_are_refused() -> None:
    with pytest.raises(BenchError, match=r"10000 ms old, in steps of 0.02 ms, do not .* at most 208 ms"):
        aged_views(10.0, 0.02e-3, 96 * 64)


@pytest.mark.parametrize("policy", list(Policy))
def test_no_server_that_is_known_to_be_down_is_chosen(policy: Policy) -> None:
    up = np.array([[False, True, True, False], [True, False, False, False]])
    balancer = Balancer(policy, np.random.default_rng(0), up)
    views = ServerViews(np.zeros((2, 4), np.int64), np.zeros((2, 4)))
    chosen = balancer.choose(np.repeat([0, 1], 50), views)
    assert set(chosen[:50].tolist()) == {1, 2}
    assert set(chosen[50:].tolist()) == {0}


@pytest.mark.parametrize("policy", list(Policy))
def test_a_server_that_refused_is_not_chosen_again(policy: Policy) -> None:
    up = np.ones((2, 3), bool)
    up[0, 1] = up[1, :2] = False
    balancer = Balancer(policy, np.random.default_rng(1), up)
    # Those that refused look best.
    views = ServerViews(np.array([[0, 0, 9], [0, 0, 0]]), np.array([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]))
    lane_A = np.repeat([0, 1], 50)
    chosen = balancer.choose(lane_A, views, np.where(lane_A == 0, 0, 2))
    # The only server of a lane is asked again.
    assert (chosen == 2).all()


def test_the_arrivals_of_a_step_fill_the_lowest_first() -> None:
    balancer = Balancer(Policy.LEAST_OUTSTANDING, np.random.default_rng(0), np.ones((1, 3), bool))
    chosen = balancer.choose(np.zeros(5, np.int64), ServerViews(np.array([[0, 2, 3]]), np.zeros((1, 3))))
    # The last one finds three servers of three each.
    assert sorted((np.bincount(chosen, minlength=3) + np.array([0, 2, 3])).tolist()) == [3, 3, 4]


@pytest.mark.parametrize("zones", [1, 3, 7, 100])
def test_what_stays_of_a_simulated_part_has_its_share_of_the_load(zones: int) -> None:
    outage = Outage(zones=zones, nodes=2)
    lanes, fractions = failing_lanes(service(), outage, Conditions(), [40, 1000])
    assert lanes.failures is not None
    left_L = (lanes.exists_LS & ~lanes.failures.down_LS).sum(1)
    for lane, servers in enumerate((40, 1000)):
        assert lanes.rate_L[lane] / left_L[lane] == pytest.approx(5000.0 / outage.survivors(servers))
    assert fractions[0] == 1
    assert lanes.exists_LS[1].sum() == 64


def test_the_servers_of_a_large_fleet_are_found_to_within_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    needed, tried = 1043, list[int]()

    def lanes_of(service: Service, outage: Outage, conditions: Conditions, servers: list[int]) -> tuple[object, object]:
        tried[:] = servers
        return servers, servers

    monkeypatch.setattr(sizing, "failing_lanes", lanes_of)
    monkeypatch.setattr(sizing, "simulate", lambda *_, **__: None)
    monkeypatch.setattr(sizing, "window_percentiles", lambda *_: np.where(np.array(tried) < needed, np.inf, 0.01))
    for first in (30, 700, 1000, 1043):
        found = sizing._fewest(service(), Outage(), Conditions(), first, lambda _: None)  # pyright: ignore[reportPrivateUsage]
        assert needed <= found <= needed * 1.01, first


@pytest.mark.slow
def test_a_plan_keeps_the_budget_while_a_zone_is_lost() -> None:
    outage = Outage(zones=3, nodes=1, detection=Detection(detect_ms=200.0))
    said: list[str] = []
    found = plan(service(server=replace(SLOW, frontend_us=0.0, message_bytes=0)), outage, Conditions(), said.append)
    assert found.p99_s <= 0.05
    assert found.servers >= found.bounds["engine"]
    assert found.failure.busy_L[0] < 1
    assert said[0].startswith("pictures: ")


@pytest.mark.thorough
def test_a_day_of_a_small_fleet() -> None:
    settings = CapacitySettings(
        demand=SMALL,
        servers=replace(read_fleet(None), pictures=replace(SLOW, frontend_us=0.0)),
        counts={"pictures": 6},
        pictures_ms=250.0,
        moment_s=1.0,
        price=2.0,
    )
    result = run_capacity(settings, lambda _: None)
    day = result.days[0]
    assert (result.servers, day.cells) == (6, 96 * 6)
    assert day.lost_T.sum() == 2
    assert day.rate_T.max() == pytest.approx(SMALL.picture_rate, rel=0.01)
    # The engines that stay have more to do.
    assert day.busy_T[day.lost_T].min() > day.busy_T[~day.lost_T].max() * 0.9
    assert result.cost_a_million == pytest.approx(2 * 6 * 24 / 20)
    record = json.loads(json.dumps(capacity_record(result)))
    assert record["services"][0]["moments"][80]["lost"]
    again = simulate_day(
        day.service, SMALL, settings.outage, settings.conditions, servers=6, moment_s=settings.moment_s
    )
    assert np.array_equal(again.p99_s_T, day.p99_s_T, equal_nan=True)
    assert np.array_equal(again.busy_T, day.busy_T)


@pytest.mark.thorough
def test_policies_are_compared_under_one_load() -> None:
    slower = service(server=ServerModel(rows=(1, 4), ms=(40.0, 80.0)), latency_ms=500.0)
    found = compare_policies(slower, Conditions(), 0.5, ages_ms=(0.0,), seconds=4.0)
    assert max(each.refused for each in found) < 0.01
    assert found[0].p99_ms > found[1].p99_ms
    assert [each.policy for each in found] == list(Policy)
    with pytest.raises(BenchError, match="the load is 0 of the capacity"):
        compare_policies(service(), Conditions(), 0.0)


def test_a_fleet_that_fails_whole_is_refused() -> None:
    with pytest.raises(BenchError, match="all 3 servers of pictures fail with a zone and 2 nodes"):
        plan(service(), Outage(zones=3, nodes=2), Conditions(), lambda _: None, servers=3)


def test_the_servers_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[pictures]\nrows = [1, 2]\nms = [3, 4.5]\nhandling_us = 12\n")
    found = read_fleet(file)
    assert found.speech == SPEECH
    assert found.pictures == replace(PICTURES, rows=[1, 2], ms=[3, 4.5], handling_us=12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pictures", "is not readable"),
        ("[images]", "has images; its tables are"),
        ("pictures = 1", "pictures in .* is 1; write it as a table"),
        ("[speech]\nspeed = 1", "has 'speed'; its keys are rows, ms"),
        ("[speech]\nrows = 1\nms = [1]", "rows of .speech. in .* is 1; give a list of whole numbers"),
        ("[speech]\nrows = [1.5]\nms = [1]", "give a list of whole numbers"),
        ("[speech]\ngigabits = true", "gigabits of .speech. in .* is True; give a number"),
        ("[speech]\nrows = [1]", "only one of rows and ms"),
        ("[speech]\nrows = [2]\nms = [1]", r"batch sizes are \[2\]; give them ascending, the first of them 1"),
        ("[speech]\nrows = [1, 2]\nms = [1]", "2 sizes and 1 times"),
        ("[speech]\nrows = [1]\nms = [nan]", r"batch times are \[nan\] ms; each must be above 0"),
        ("[speech]\nfrontend_cores = 0", "frontend_cores is 0; it must be above 0"),
        ("[speech]\nrows = [1, 1000000000]\nms = [1, 2]", "the largest batch has 1,000,000,000 rows; give at most"),
        ("[speech]\njitter = 100", "jitter is 100; give 0 to 2"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(BenchError, match=said):
        read_fleet(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--users 0", "users is 0"),
        ("--users nan", "users is nan"),
        ("--utterances 0 --pictures 0", "neither utterances nor pictures"),
        ("--peak 0.5", "peak is 0.5 times the mean; give 1 to 100"),
        ("--peak-hour 25", "peak_hour is 25; give 0 to 24"),
        ("--zones 0", "there are 0 zones; give 1 to 1,000"),
        ("--nodes -1", "-1 nodes fail"),
        ("--outage-minutes 0", "the outage lasts 0 minutes"),
        ("--detect-ms -1", "detect_ms is -1"),
        ("--policy fastest", "--policy is 'fastest'; choose one of random, power-of-two, least-outstanding"),
        ("--view-age-ms -1", "the views' age is -1 ms"),
        ("--slow 2", "share of slow servers is 2"),
        ("--pictures-latency-ms 0", "latency_ms of pictures is 0"),
        ("--chunk-ms 0", "chunk_ms of speech is 0"),
        ("--moment-s 0", "a moment is 0 s"),
        ("--price -1", "price of a server hour is -1"),
        ("--picture-servers 0", "pictures has 0 servers"),
        ("--speech-servers 1000001", "speech has 1,000,001 servers; give 1 to 1,000,000"),
        ("--picture day.xyz", "day.xyz is no picture by its name; let it end with .png"),
        ("--picture /proc/nowhere/day.png", "/proc/nowhere/day.png cannot be written"),
        ("--picture day.png --policy-load 1", "--picture draws a day, of which --policy-load has none"),
        ("--seed -1", "--seed is -1"),
        ("--fleet nowhere.toml", "nowhere.toml is not readable"),
        ("--users 1e15", "servers by their engine, more than 1,000,000"),
    ],
)
def test_options_that_are_refused(options: str, said: str) -> None:
    done = CliRunner().invoke(build(), ["bench", "capacity", *options.split()])
    assert isinstance(done.exception, BenchError), done.exception
    assert said in str(done.exception)


@pytest.mark.thorough
def test_the_command_prints_a_fleet_and_draws_its_day(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fleet, picture = tmp_path / "fleet.toml", tmp_path / "day.png"
    fleet.write_text("[pictures]\nrows = [1, 4, 16]\nms = [2.8, 5.2, 14.8]\nfrontend_us = 0\n")
    words = "--users 2e5 --utterances 0 --pictures 100 --peak 2 --picture-servers 6 --moment-s 1 --price 3"
    words += f" --pictures-latency-ms 250 --fleet {fleet} --picture {picture}"
    done = CliRunner().invoke(build(), ["bench", "capacity", *words.split()])
    assert done.exit_code == 0, done.output
    assert "200,000 users need 6 servers" in done.output
    assert "binding resource" in done.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
