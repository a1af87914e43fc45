"""`penstock bench isolation` and `penstock bench chaos`."""

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented
from penstock.cli.printing import Format, print_rows

if TYPE_CHECKING:
    from penstock.bench.chaos.chaos_history import Event
    from penstock.bench.chaos.chaos_result import ChaosResult
    from penstock.bench.chaos.lateness import Lateness
    from penstock.bench.isolation.isolation_run import Beside, IsolationResult

SHOWN = 10


@documented
def isolation(
    seed: int = 0,
    seconds: float = 1.0,
    only: list[str] | None = None,
    connections: int = 200,
    load: float = 0.7,
    rate: float | None = None,
    frontends: int | None = None,
    latency_ms: float = 500.0,
    server_cpu: str | None = None,
    cpu: str | None = None,
    format: Annotated[Format, typer.Option()] = Format.TEXT,
) -> None:
    """Send expensive inputs from one client, at 1 MB/s at most, beside many that behave well; report what those see.

    Args:
        seed: Seed of the arrivals and of the order of the inputs.
        seconds: Duration of the load beside each input.
        only: Only the inputs whose name begins so, as json or json/deep; may be given several times.
        connections: Connections of the clients that behave well.
        load: Their share of what the server can carry, which is measured first.
        rate: Instead of --load: their requests a second, as an earlier run said.
        frontends: Front-end processes; the server's default if not given.
        latency_ms: The server's latency budget.
        server_cpu: Cores of the server, 0 or 0,1; the first half of all if not given.
        cpu: Cores of the clients and of the attacker, who has only the time that the others leave; the other half.
        format: text or json.
    """
    from penstock.bench.isolation.isolation_run import IsolationSettings, run_isolation
    from penstock.bench.load.generator import parse_cores

    settings = IsolationSettings(
        seed=seed,
        seconds=seconds,
        connections=connections,
        load=load,
        rate=rate,
        only=tuple(only or ()),
        frontends=frontends,
        latency_ms=latency_ms,
        server_cpus=parse_cores(server_cpu, "--server-cpu"),
        client_cpus=parse_cores(cpu, "--cpu"),
    )
    result = run_isolation(settings, lambda sentence: typer.echo(sentence, err=True))
    if format is Format.JSON:
        typer.echo(json.dumps(isolation_record(result)))
    else:
        _show_isolation(result)


@documented
def chaos(
    seed: int = 0,
    seconds: float = 45.0,
    events: int = 1_000_000,
    hitless: bool = False,
    rate: float = 150.0,
    load: float | None = None,
    frontends: int = 2,
    latency_ms: float = 50.0,
    limit_s: float = 30.0,
    server_cpu: str | None = None,
    cpu: str | None = None,
    format: Annotated[Format, typer.Option()] = Format.TEXT,
) -> None:
    """Kill, stop, hang and misuse a server under load, as a seed says, and check the whole history of answers.

    Args:
        seed: Seed of the faults and of the load; the same seed brings about the same faults.
        seconds: No fault begins after this time; with --hitless none of those whose time without would not end in it,
            but the first six.
        events: Most faults.
        hitless: Only loads, unloads and kills of front-ends, each when all front-ends accept and 1.5 s later. Six of
            them alternate with as long a time without; both latenesses are reported.
        rate: Requests a second.
        load: Instead of --rate: a share of what the server carried in the worst second so far; five seconds are
            measured before each pair of times with and without faults.
        frontends: Front-end processes.
        latency_ms: The server's latency budget.
        limit_s: A load or unload that is not answered in this time is stuck. The server gives up a step of a load
            after half of it.
        server_cpu: Cores of the server, 0 or 0,1.
        cpu: Cores of the clients.
        format: text or json.
    """
    from penstock.bench.chaos.chaos_result import ChaosSettings
    from penstock.bench.chaos.chaos_run import run_chaos
    from penstock.bench.chaos.fault_schedule import HITLESS, KINDS
    from penstock.bench.load.generator import parse_cores

    settings = ChaosSettings(
        seed=seed,
        seconds=seconds,
        events=events,
        kinds=HITLESS if hitless else KINDS,
        rate=rate,
        load=load,
        frontends=frontends,
        latency_ms=latency_ms,
        limit_s=limit_s,
        server_cpus=parse_cores(server_cpu, "--server-cpu"),
        client_cpus=parse_cores(cpu, "--cpu"),
        measure_lateness=hitless,
        from_whole=hitless,
    )
    result = run_chaos(settings, lambda sentence: typer.echo(sentence, err=True))
    if format is Format.JSON:
        typer.echo(json.dumps(chaos_record(result)))
    else:
        _show_chaos(result)


def isolation_record(result: "IsolationResult") -> dict[str, object]:
    """Return a result for programs; a latency that is infinite, because 1% or more were refused, is null."""
    return {
        "seed": result.settings.seed,
        "rate": result.rate,
        "quiet_p99_ms": result.quiet.p99_ms,
        "clients_late_p99_ms": result.quiet.late_p99_ms,
        "clients_busy": result.clients_busy,
        "quiet_refused": result.quiet.refused,
        "worst_p99_ratio": _finite(result.worst_ratio),
        "refused": result.refused,
        "inputs": [
            {
                "name": each.name,
                "p99_ms": _finite(each.p99_ms),
                "quiet_p99_ms": each.quiet_p99_ms,
                "p99_ratio": _finite(each.ratio),
                "refused": each.refused,
                "requests": each.requests,
                "attacker_bytes": each.attacker_bytes,
                "clients_late_p99_ms": each.late_p99_ms,
                "settled_s": each.settled_s,
            }
            for each in result.inputs
        ],
    }


def chaos_record(result: "ChaosResult") -> dict[str, object]:
    """Return a result for programs."""
    return {
        "seed": result.settings.seed,
        "events": len([event for event in result.events if not event.skipped]),
        "skipped": sorted({f"{event.kind}: {event.skipped}" for event in result.events if event.skipped}),
        "requests": result.requests,
        "rates": result.rates,
        "clients_late_p99_ms": result.clients_late_s * 1e3,
        "others_cores": result.others_cores,
        "restarts": result.restarts,
        "load_s": [history.load_s for history in result.histories],
        "worst_recovery_s": result.worst[1] if result.worst else None,
        "worst_recovery": _after(result.worst[0]) if result.worst else None,
        "over_budget_ms": result.over_budget_ms,
        "beside_faults": _lateness(result.beside_faults),
        "without_faults": _lateness(result.without_faults),
        "pairs": result.pairs,
        "late_pairs": result.late_pairs,
        "beside_faults_left_out": _lateness(result.left_out),
        "busy_without_faults": _finite(result.busy),
        "avoidable_5xx": result.avoidable_5xx,
        "without_faults_5xx": result.without_faults_5xx,
        "paused_5xx": result.paused_5xx,
        "avoidable": result.failed,
        "violations": result.counts,
        "first_violation": None if not result.violations else result.violations[0].text,
    }


def _after(event: "Event | None") -> str | None:
    return None if event is None else f"{event.number}: {event.kind}"


def _lateness(lateness: "Lateness | None") -> dict[str, object] | None:
    if lateness is None:
        return None
    return {
        "over_budget_ms": lateness.over_ms,
        "requests": lateness.requests,
        "late": lateness.late,
        "after": _after(lateness.event),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show_isolation(result: "IsolationResult") -> None:
    def cells(each: "Beside") -> str:
        if not math.isfinite(each.p99_ms):
            return f"1% or more of {each.requests:,} were refused or lost ({each.refused:,})"
        refused = f"{each.refused:,} of {each.requests:,} refused"
        return f"p99 {each.p99_ms:,.1f} ms, {each.ratio:.1f} times quiet ({each.quiet_p99_ms:,.1f} ms); {refused}"

    quiet, worst = result.quiet, result.inputs[0]
    rows = {
        "the others": f"{result.rate:,.0f} requests/s; their own process is late by {quiet.late_p99_ms:.2f} ms (p99), "
        f"and works {result.clients_busy:.0%} of the time",
        "quiet": f"p99 {quiet.p99_ms:,.1f} ms; {quiet.refused:,} of {quiet.requests:,} refused",
    }
    rows |= {each.name: cells(each) for each in result.inputs[:SHOWN]}
    rows["refused over all inputs"] = f"{result.refused:,} of {sum(each.requests for each in result.inputs):,}"
    print_rows(rows, title=f"The {min(SHOWN, len(result.inputs))} worst of {len(result.inputs)} inputs")
    again = f"penstock bench isolation --only {worst.name} --rate {result.rate:.0f} --seconds 10"
    typer.echo(f"Worst input: {worst.name}. To repeat it alone: {again}")


def _show_chaos(result: "ChaosResult") -> None:
    done = [event for event in result.events if not event.skipped]
    lowest, highest = min(result.rates), max(result.rates)
    rates = f"{lowest:,.0f}" if lowest == highest else f"{lowest:,.0f} to {highest:,.0f}"
    rows = {
        "faults": f"{len(done):,}; {len(result.events) - len(done):,} skipped",
        "requests": f"{result.requests:,}, {rates} a second; the clients were late by "
        f"{result.clients_late_s * 1e3:.2f} ms (p99)",
        "other processes": f"used {result.others_cores:.2f} cores",
        "servers started anew": f"{result.restarts:,}",
        "avoidable 5xx": f"{result.avoidable_5xx:,}; in times without faults {result.without_faults_5xx:,}, beside "
        f"pauses of the machine {result.paused_5xx:,}",
    }
    if result.worst is not None:
        event, seconds = result.worst
        rows["longest recovery"] = (
            f"{seconds:.2f} s beyond one load, after {event.number}: {event.kind}: {event.detail}"
        )
    if result.beside_faults is not None and result.without_faults is not None:
        beside, without = result.beside_faults, result.without_faults
        after = "" if beside.event is None else f", after {_after(beside.event)}: {beside.event.detail}"
        rows["past the budget"] = f"{result.over_budget_ms:.1f} ms more with faults than without"
        rows["with faults"] = f"{beside.over_ms:.1f} ms; {beside.late:,} of {beside.requests:,} are late{after}"
        rows["without faults"] = (
            f"{without.over_ms:.1f} ms; {without.late:,} of {without.requests:,} are late; the server's cores were "
            f"busy for {result.busy:.0%} of the time"
        )
        rows["left out"] = (
            f"{result.late_pairs} of {result.pairs} pairs of times, in which it was late without faults; with faults "
            f"up to {result.left_out.over_ms:.1f} ms"
        )
    rows |= {f"avoidable {number}": said for number, said in enumerate(result.failed[:SHOWN])}
    rows |= {kind: f"{count:,}" for kind, count in result.counts.items()}
    for reason in sorted({f"{event.kind}: {event.skipped}" for event in result.events if event.skipped}):
        rows[f"skipped {reason.partition(':')[0]}"] = reason.partition(": ")[2]
    print_rows(rows, title=f"Chaos with seed {result.settings.seed}")
    if result.violations:
        first = result.violations[0]
        settings = result.settings
        again = f"penstock bench chaos --seed {settings.seed} --events {result.events_before(first)} --seconds 600"
        typer.echo(f"First violation: {first.kind}: {first.text}.\nTo repeat it: {again}")
    else:
        typer.echo("No violation.")
