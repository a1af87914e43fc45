"""The simulation beside HAProxy over 16 paced servers: latency and refusals at twelve points."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import typer

from benchmarks.acceptance.fleet.haproxy import haproxy
from benchmarks.acceptance.fleet.paced_servers import Pace, PacedServers, paced_servers
from penstock.bench.capacity.fleet_lanes import equal_servers
from penstock.bench.capacity.policies import Policy
from penstock.bench.capacity.request_cells import RequestCells
from penstock.bench.capacity.server_model import CostTables
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError

SERVERS = 16
PACE = Pace(rows=(1, 2, 4), ms=(50.0, 60.0, 80.0), budget_ms=250.0)
LOADS = (0.5, 0.7, 0.9, 1.15)
BALANCE = {
    Policy.RANDOM: "random(1)",
    Policy.POWER_OF_TWO: "random(2)",
    Policy.LEAST_OUTSTANDING: "leastconn",
}
SECONDS, WARM_S, CONNECTIONS = 20.0, 3.0, 1024
SIMULATED_S, LANES, STEP_S = 40.0, 16, 0.001
# A machine on which 1% of the batches end later than this is too busy for a figure.
MAX_LATE_MS = 8.0
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPoint:
    """One policy at one load, measured and simulated.

    Args:
        policy: The policy.
        load: Requests over the capacity of all servers.
        p99_ms: Measured 99th percentile of the answers.
        refused: Measured share of refusals.
        simulated_p99_ms: The same in simulation.
        simulated_refused: The same in simulation.
    """

    policy: Policy
    load: float
    p99_ms: float
    refused: float
    simulated_p99_ms: float
    simulated_refused: float

    @property
    def p99_error(self) -> float:
        """Relative error of the simulated percentile."""
        return abs(self.simulated_p99_ms / self.p99_ms - 1)

    @property
    def refused_error(self) -> float:
        """Difference of the shares of refusals."""
        return abs(self.simulated_refused - self.refused)


def p99_error() -> list[float]:
    """Return the largest relative error of the simulated 99th percentile over the points.

    Raises:
        BenchError: HAProxy is missing, a request got neither an answer nor a refusal, or the machine is too busy.
    """
    return [max(point.p99_error for point in points())]


def refused_error() -> list[float]:
    """Return the largest difference of the share of refusals over the points, see `p99_error`."""
    return [max(point.refused_error for point in points())]


@cache
def points() -> list[FleetPoint]:
    """Measure and simulate all points; both figures share them."""
    found: list[FleetPoint] = []
    capacity = SERVERS * PACE.rows[-1] / PACE.ms[-1] * 1e3
    with paced_servers(SERVERS, PACE) as servers:
        for policy, balance in BALANCE.items():
            for load in LOADS:
                real = measured_in_time(servers, balance, load * capacity)
                point = _point(policy, load, real, simulated(policy, load * capacity))
                found.append(point)
                typer.echo(
                    f"{policy} at {load:g}: p99 {point.p99_ms:.1f} ms, simulated {point.simulated_p99_ms:.1f}; refused "
                    f"{point.refused:.2%}, simulated {point.simulated_refused:.2%}"
                )
    return found


def measured(port: int, rate: float) -> LoadResult:
    """Put a Poisson load on a port.

    Args:
        port: The proxy's, or that of one server.
        rate: Requests a second.

    Raises:
        BenchError: A request got neither an answer nor a refusal.
    """
    target = Target(
        host="127.0.0.1", port=port, requests=(b"GET / HTTP/1.1\r\nHost: paced\r\n\r\n",), answers=None, tolerance=0.0
    )
    load = Load(rate=rate, connections=CONNECTIONS, seconds=SECONDS, warm_up_s=WARM_S, sender="auto")
    result = measure(target, load)
    if result.failed or result.lost:
        raise BenchError(f"{result.failed:,} requests failed and {result.lost:,} were lost, so no figure is given.")
    return result


def simulated(policy: Policy, rate: float) -> RequestCells:
    """Simulate the same load on the same servers.

    Args:
        policy: The policy.
        rate: Requests a second.
    """
    return RequestCells(
        equal_servers([rate] * LANES, [SERVERS] * LANES),
        CostTables(PACE.costs(), PACE.budget_ms / 1e3),
        policy,
        step_s=STEP_S,
        seconds=WARM_S + SIMULATED_S,
        warm_s=WARM_S,
        # HAProxy passes a server's refusal on.
        redispatch=False,
    ).run()


def _point(policy: Policy, load: float, real: LoadResult, cells: RequestCells) -> FleetPoint:
    counts = cells.counts
    answered = counts.answered.sum(0)
    return FleetPoint(
        policy=policy,
        load=load,
        p99_ms=real.percentile_ms(99),
        refused=real.refused / real.offered,
        simulated_p99_ms=counts.percentile_s(99, answered_only=True) * 1e3,
        simulated_refused=float(counts.refused.sum() / (counts.refused.sum() + answered.sum())),
    )


def measured_in_time(servers: PacedServers, balance: str, rate: float) -> LoadResult:
    """Measure a rate, again where something else on the machine made batches end later than their costs say.

    Args:
        servers: The servers.
        balance: See `haproxy`.
        rate: Requests a second.

    Raises:
        BenchError: A request got neither an answer nor a refusal, or the machine is too busy.
    """
    late = 0.0
    for _ in range(ATTEMPTS):
        servers.late_ms()
        with haproxy(balance, servers.ports) as port:
            result = measured(port, rate)
        late = float(np.percentile(servers.late_ms(), 99))
        if late <= MAX_LATE_MS:
            return result
        typer.echo(f"1% of the batches ended {late:.1f} ms late or later; once more")
    raise BenchError(
        f"1% of the batches ended {late:.1f} ms late or later in {ATTEMPTS} attempts, and a figure needs "
        f"{MAX_LATE_MS:g} ms: the machine is too busy; run this alone."
    )
