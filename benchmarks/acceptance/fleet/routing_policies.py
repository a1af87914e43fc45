"""Load-balancing policies of real HAProxy where some servers are slow: refusals and p99 of each."""

from dataclasses import dataclass

import typer

from benchmarks.acceptance.figures import Repetitions
from benchmarks.acceptance.fleet.against_haproxy import PACE, SERVERS, measured_in_time
from benchmarks.acceptance.fleet.haproxy import FINISH
from benchmarks.acceptance.fleet.paced_servers import Pace, PacedServers, paced_servers

SLOW = 2
STRETCH = 2.0
# Requests over the capacity of all servers.
LOAD = 0.8
REPEAT = 3
BALANCE = {
    "round robin": "roundrobin",
    "leastconn": "leastconn",
    "power of two by count": "random(2)",
    FINISH: FINISH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """Refusals and latency of one policy.

    Args:
        refused: Share of the requests that were refused.
        p99_ms: 99th percentile of the answers.
    """

    refused: float
    p99_ms: float


def finish_refused() -> Repetitions:
    """Return the share of the requests that are refused by predicted finish, and in words that of the others.

    Raises:
        BenchError: HAProxy is missing, a request got neither an answer nor a refusal, or the machine is too busy.
    """
    values: list[float] = []
    notes: list[str] = []
    stretch = (1.0,) * (SERVERS - SLOW) + (STRETCH,) * SLOW
    pace = Pace(rows=PACE.rows, ms=PACE.ms, budget_ms=PACE.budget_ms, stretch=stretch, reports=True)
    rate = LOAD * sum(1 / pace.row_s(number) for number in range(SERVERS))
    with paced_servers(SERVERS, pace) as servers:
        for _ in range(REPEAT):
            results = {policy: _measured(servers, balance, rate) for policy, balance in BALANCE.items()}
            notes.append(
                ", ".join(f"{name} {each.refused:.2%} and {each.p99_ms:.0f} ms" for name, each in results.items())
            )
            typer.echo(notes[-1])
            values.append(results[FINISH].refused)
    return Repetitions(values, f"refused and p99 in each repetition: {'; '.join(notes)}")


def _measured(servers: PacedServers, balance: str, rate: float) -> PolicyResult:
    result = measured_in_time(servers, balance, rate)
    return PolicyResult(refused=result.refused / result.offered, p99_ms=result.percentile_ms(99))
