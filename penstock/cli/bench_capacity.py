"""`penstock bench capacity`: a fleet in simulation."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented
from penstock.cli.printing import Format, print_rows
from penstock.core.errors import BenchError
from penstock.core.wording.counted import counted

if TYPE_CHECKING:
    from penstock.bench.capacity.capacity_run import CapacityResult, CapacitySettings


@documented
def capacity(
    users: float = 300e6,
    utterances: float = 3.0,
    utterance_s: float = 5.0,
    pictures: float = 2.0,
    peak: float = 3.0,
    peak_hour: float = 20.0,
    zones: int = 3,
    nodes: int = 2,
    outage_minutes: float = 30.0,
    detect_ms: float = 600.0,
    connect_ms: float = 20.0,
    reconnect_ms: float = 500.0,
    policy: str = "predicted-finish",
    view_age_ms: float = 20.0,
    slow: float = 0.0,
    fleet: Annotated[Path | None, typer.Option(metavar="FLEET.toml")] = None,
    pictures_latency_ms: float = 50.0,
    speech_latency_ms: float = 50.0,
    chunk_ms: float = 80.0,
    picture_servers: int | None = None,
    speech_servers: int | None = None,
    price: float | None = None,
    moment_s: float = 10.0,
    policy_load: float | None = None,
    seed: int = 0,
    picture: Path | None = None,
    format: Annotated[Format, typer.Option()] = Format.TEXT,
) -> None:
    """Simulate a fleet: its servers, cost and binding resource, and a day with a zone lost at the peak.

    The servers decide by the scheduler's costs and admission control. Nothing is sent to any server.

    Args:
        users: Users of a day.
        utterances: Live streams of speech of each user and day.
        utterance_s: Length of each in seconds.
        pictures: Pictures of each user and day.
        peak: Peak rate over the mean rate.
        peak_hour: Hour of the peak.
        zones: Zones over which the servers are spread; one of two or more is lost at the peak.
        nodes: Servers of other zones that fail at the same moment.
        outage_minutes: Time until they are back.
        detect_ms: Time until the load balancer's health checks have found out.
        connect_ms: Time that a request to a server which is down loses until then.
        reconnect_ms: Time until a client's interrupted stream connects again: this to twice this.
        policy: random, power-of-two, least-outstanding, join-idle or predicted-finish (power of two).
        view_age_ms: Age of what the load balancer knows of the servers.
        slow: Share of the servers at half speed.
        fleet: Measured costs and resources of a server; by default those of one H200.
        pictures_latency_ms: Latency budget of a picture.
        speech_latency_ms: Latency budget of a chunk of sound.
        chunk_ms: Time from one chunk of a stream to the next.
        picture_servers: Servers of pictures, instead of the fewest that keep the budget.
        speech_servers: Servers of speech, instead of the fewest that keep the budget.
        price: Price of a server hour, in any currency.
        moment_s: Simulated seconds of each of the 96 moments of the day.
        policy_load: Instead of a day: all policies on 64 servers at this share of what they carry.
        seed: Seed of arrivals, choices and batch times; the same seed gives the same result.
        picture: File for a picture of the day.
        format: text or json.
    """
    from penstock.bench.capacity.capacity_picture import check_picture, draw_day
    from penstock.bench.capacity.capacity_run import CapacitySettings, capacity_record, run_capacity
    from penstock.bench.capacity.demand import Demand
    from penstock.bench.capacity.fleet_file import read_fleet
    from penstock.bench.capacity.fleet_lanes import Detection
    from penstock.bench.capacity.fleet_service import Conditions
    from penstock.bench.capacity.policies import Policy
    from penstock.bench.capacity.sizing import Outage

    if policy not in list(Policy):
        raise BenchError(f"--policy is {policy!r}; choose one of {', '.join(Policy)}.")
    if picture is not None and find_spec("matplotlib") is None:
        raise BenchError("--picture needs matplotlib, which is not installed; pip install 'penstock-nn[bench]'.")
    if picture is not None:
        if policy_load is not None:
            raise BenchError("--picture draws a day, of which --policy-load has none; leave one of them out.")
        check_picture(picture)
    if seed < 0:
        raise BenchError(f"--seed is {seed}; it must not be below 0.")
    counts = {"pictures": picture_servers, "speech": speech_servers}
    settings = CapacitySettings(
        demand=Demand(
            users=users,
            utterances=utterances,
            utterance_s=utterance_s,
            pictures=pictures,
            peak=peak,
            peak_hour=peak_hour,
        ),
        servers=read_fleet(fleet),
        outage=Outage(
            zones=zones,
            nodes=nodes,
            minutes=outage_minutes,
            detection=Detection(detect_ms=detect_ms, connect_ms=connect_ms, reconnect_ms=reconnect_ms),
        ),
        conditions=Conditions(policy=Policy(policy), view_age_ms=view_age_ms, slow=slow, seed=seed),
        pictures_ms=pictures_latency_ms,
        speech_ms=speech_latency_ms,
        chunk_ms=chunk_ms,
        counts={name: count for name, count in counts.items() if count is not None},
        moment_s=moment_s,
        price=price,
    )
    if policy_load is not None:
        _compare(settings, policy_load, format)
        return
    result = run_capacity(settings, lambda sentence: typer.echo(sentence, err=True))
    if format is Format.JSON:
        typer.echo(json.dumps(capacity_record(result)))
    else:
        _show(result)
    if picture is not None:
        typer.echo(f"Picture: {draw_day(result, picture)}", err=format is Format.JSON)


def _compare(settings: "CapacitySettings", load: float, format: Format) -> None:
    from penstock.bench.capacity.compared_policies import SERVERS, compare_policies

    record: dict[str, list[dict[str, object]]] = {}
    for service in settings.services():
        found = compare_policies(service, settings.conditions, load)
        record[service.name] = [
            {
                "policy": str(each.policy),
                "view_age_ms": each.view_age_ms,
                "refused": each.refused,
                "p99_ms": each.p99_ms,
            }
            for each in found
        ]
        rows = {
            f"{each.policy}, views {each.view_age_ms:g} ms old": f"{each.refused:.2%} refused, p99 {_ms(each.p99_ms)}"
            for each in found
        }
        if format is Format.TEXT:
            print_rows(rows, title=f"{service.name}: {SERVERS} servers at {load:.0%} of what they carry")
    if format is Format.JSON:
        for each in (entry for entries in record.values() for entry in entries):
            each["p99_ms"] = each["p99_ms"] if math.isfinite(float(str(each["p99_ms"]))) else None
        typer.echo(json.dumps(record))


def _show(result: "CapacityResult") -> None:
    settings = result.settings
    for each, day in zip(result.plans, result.days, strict=True):
        service, streams = each.service, each.service.chunk_ms is not None
        load = f"{service.peak_rate:,.0f} {'streams begun' if streams else 'requests'}/s"
        if streams:
            load += f", {service.peak_rate * service.chunks * (service.chunk_ms or 0) / 1e3:,.0f} at once"
        left, nodes = settings.outage.survivors(each.servers), counted(settings.outage.nodes, "node")
        full, lost = (service.utilization(service.peak_messages, count) for count in (each.servers, max(left, 1)))
        engine = f"engines {day.busy_T[~day.lost_T].max():.0%}, {day.busy_T[day.lost_T].max():.0%} with what stays"
        budget, worst = f"budget {service.latency_ms:g} ms", f"{day.refused_T.max():.2%}"
        rows = {
            "peak": load,
            "servers": f"{each.servers:,}; {left:,} stay when a zone and {nodes} are lost",
            "binding resource": _binding(each.binding, each.bounds),
            "used at the peak": "; ".join([engine, *(f"{name} {full[name]:.0%}, {lost[name]:.0%}" for name in full)]),
            "p99 of the day": f"{_ms(day.p99_s * 1e3)}, {budget}; {worst} refused at the worst moment",
            "p99 in the minute of the failure": f"{_ms(each.p99_s * 1e3)}, {budget}",
            "simulated": f"{day.simulated:,} {'chunks' if streams else 'requests'} on {day.cells:,} cells",
        }
        if streams:
            rows["interrupted streams"] = f"{each.interrupted_streams:,}"
        print_rows(rows, title=f"{service.name}, {settings.conditions.policy}")
    cost = "" if result.cost_a_million is None else f", cost {result.cost_a_million:,.4g}"
    typer.echo(
        f"{settings.demand.users:,.0f} users need {counted(result.servers, 'server')}. A million requests take "
        f"{result.server_hours_a_million:.3g} server hours{cost}. The day took {result.day_seconds:.1f} s to simulate."
    )


def _binding(binding: str, bounds: dict[str, int]) -> str:
    needs = ", ".join(f"{name} {count:,}" for name, count in bounds.items())
    return f"{binding} (servers needed by capacity alone: {needs})"


def _ms(value: float) -> str:
    if math.isnan(value):
        return "none, as nothing came"
    return f"{value:,.2f} ms" if math.isfinite(value) else "none, 1% or more without an answer"
