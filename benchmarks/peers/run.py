"""Penstock beside other servers: the same network and requests, one core for the server, another for the load.

python -m benchmarks.peers.run [--only NAME ...] [--model cnn|mlp] [--bundle DIR] [--connections 2048] [--repeat 5]
    [--seconds 3] [--sender auto|compiled|python] [--out FILE] [--record]

Every repetition starts each server anew, one after the other, so that a drift of the machine's speed meets all of them.
An answer that is not the golden one ends the run.
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.report.performance_page import read_targets
from benchmarks.acceptance.report.results import record_result
from benchmarks.models.write import ONE_SHOT, write_bundle
from benchmarks.peers.bundle_network import Network
from benchmarks.peers.golden_requests import checked_target
from benchmarks.peers.peer_process import make_environment, running, wait_until_quiet
from benchmarks.peers.servers import HOME, PEERS, PENSTOCK, ComparedServer, select_servers
from penstock.bench.compiled_program import KINDS, SenderKind
from penstock.bench.load.generator import Load, NoRateWithinBudget, find_goodput, measure
from penstock.bench.load.sender import Target
from penstock.bench.measurement import Comparison, Measurement, make_measurement, own_command
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import PenstockError
from penstock.core.spec import Array

SERVER_CORE, LOAD_CORE = 0, 1
BUDGET_MS = 50.0
CLOSED_CONNECTIONS = 64
# More than can be answered within the budget at any of these rates: load shedding is left to the server, and no request
# waits for a connection that a slow answer occupies.
OPEN_CONNECTIONS = 2048
# Times as many under an overload: 50,000 requests/s of 50 ms each are 2,500 at once, and what has no connection waits
# in the sender, where no server can refuse it.
TIMES_UNDER_OVERLOAD = 4
OVERLOAD_CONNECTIONS = TIMES_UNDER_OVERLOAD * OPEN_CONNECTIONS
# Above the closed loop's rate, where larger batches form.
HIGHEST_OVER_CLOSED = 1.3
# A pause of the virtual machine fails any server's trial: a rate is too high once it failed twice.
ATTEMPTS = 2
OVERLOADS = (1.5, 3.0)
# Batches of the network alone.
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
RAW_RUNS = 7

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadMetric:
    """One measured metric.

    Args:
        heading: Heading of its column.
        workload: The load.
        metric: The meaning of the number.
    """

    heading: str
    workload: str
    metric: str


CLOSED = LoadMetric(
    heading="closed loop",
    workload=f"closed loop, {CLOSED_CONNECTIONS} connections",
    metric="right answers a second",
)
BEST = LoadMetric(
    heading=f"within {BUDGET_MS:g} ms",
    workload=f"open loop, {OPEN_CONNECTIONS} connections",
    metric=f"highest Poisson rate with 99% of all requests answered within {BUDGET_MS:g} ms",
)
OVERLOADED = tuple(
    LoadMetric(
        heading=f"at {factor:g}x",
        workload=f"open loop at {factor:g} times its own best rate, {OVERLOAD_CONNECTIONS} connections",
        metric=f"right answers within {BUDGET_MS:g} ms a second",
    )
    for factor in OVERLOADS
)
# A refused client sends its next request at once.
RETRYING = LoadMetric(
    heading="sent again at once",
    workload=f"closed loop, {OPEN_CONNECTIONS} connections, refused requests sent again at once",
    metric=f"right answers within {BUDGET_MS:g} ms a second",
)
FIGURES = (CLOSED, BEST, *OVERLOADED, RETRYING)

Values = dict[tuple[ComparedServer, LoadMetric], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is served, and how the load is sent.

    Args:
        model: Name of the model.
        tuning: The model whose tuning the peers have.
        bundle: Its bundle.
        rows: Type and shape of an input, of a network that the project does not contain.
        connections: Connections of the open loops and of clients that send again at once; under an overload,
            `TIMES_UNDER_OVERLOAD` times as many.
        seconds: Duration of each load.
        sender: The sender, see `Load`.
    """

    model: str
    tuning: str
    bundle: Path
    rows: str = ""
    connections: int = OPEN_CONNECTIONS
    seconds: float = 3.0
    sender: SenderKind = "auto"

    @property
    def has_targets(self) -> bool:
        """True if its figures are those of the targets."""
        return self.bundle.is_relative_to(HOME) and self.connections == OPEN_CONNECTIONS

    @property
    def label(self) -> str:
        """The network in the words of a result."""
        return f"{self.model} ({self.rows})" if self.rows else self.model

    def describe(self, figure: LoadMetric) -> str:
        """Return the load of a metric in words."""
        times = TIMES_UNDER_OVERLOAD if figure in OVERLOADED else 1
        said, connections = times * OPEN_CONNECTIONS, times * self.connections
        return figure.workload.replace(f"{said} connections", f"{connections} connections")


def measure_once(target: Target, workload: Workload, seed: int, say: Say) -> dict[LoadMetric, float]:
    """Measure every metric of a running server once, in requests a second; NaN where the sender was too slow for it.

    Raises:
        BenchError: An answer was wrong, or none came to the closed loop.
    """
    load = Load(
        rate=None,
        connections=CLOSED_CONNECTIONS,
        seconds=workload.seconds,
        cpus=frozenset({LOAD_CORE}),
        seed=1000 * seed,
        sender=workload.sender,
    )
    closed = measure(target, load).answered_a_second
    open_load = replace(load, connections=workload.connections)
    retrying = measure(target, open_load, none_answered=True).goodput(BUDGET_MS)
    highest = closed * HIGHEST_OVER_CLOSED
    try:
        best, _ = find_goodput(
            target,
            open_load,
            budget_ms=BUDGET_MS,
            highest=highest,
            say=lambda text: say(f"  {text}"),
            attempts=ATTEMPTS,
        )
    except NoRateWithinBudget as error:
        say(f"  {error}")
        return dict.fromkeys(FIGURES, 0.0) | {CLOSED: closed, RETRYING: retrying}
    figures = {CLOSED: closed, BEST: best, RETRYING: retrying}
    overload = replace(open_load, connections=TIMES_UNDER_OVERLOAD * workload.connections)
    for factor, figure in zip(OVERLOADS, OVERLOADED, strict=True):
        overloaded = measure(target, replace(overload, rate=factor * best), none_answered=True)
        figures[figure] = overloaded.goodput(BUDGET_MS)
        share = overloaded.share_within(BUDGET_MS)
        say(f"  {figure.heading}: {share:.2%} within {BUDGET_MS:g} ms{overloaded.shortfall}")
        if overloaded.was_late:
            say("  This says nothing: the load itself was late.")
            figures[figure] = math.nan
    return figures


def compare(
    workload: Workload, servers: Sequence[ComparedServer], *, repeat: int, patience_s: float, say: Say
) -> Values:
    """Measure every server, repeated and interleaved; return early with the results so far on Ctrl-C."""
    model, bundle = workload.model, workload.bundle
    values: Values = {(server, figure): [] for server in servers for figure in FIGURES}
    try:
        for repetition in range(repeat):
            for server in servers:
                wait_until_quiet(patience_s, say)
                with running(server, workload.tuning, bundle, SERVER_CORE) as port:
                    target = checked_target(server, model, bundle, port)
                    say(f"{model}, {server.label}, {repetition + 1} of {repeat}: answers are the golden ones")
                    figures = measure_once(target, workload, repetition, say)
                known = {figure.heading: value for figure, value in figures.items() if not math.isnan(value)}
                say("  " + ", ".join(f"{heading} {value:,.0f}/s" for heading, value in known.items()))
                for figure, value in figures.items():
                    values[server, figure].append(value)
    except KeyboardInterrupt:
        say("Interrupted; measured so far:")
    return {key: measured for key, measured in values.items() if measured}


def measurements_of(workload: Workload, values: Values, command: str) -> list[Measurement]:
    """Return a measurement for each server and metric; Penstock's beside the best of this run."""
    lines: list[Measurement] = []
    known = {key: [value for value in measured if not math.isnan(value)] for key, measured in values.items()}
    for (server, figure), measured in known.items():
        if not measured:
            continue
        median = float(np.median(measured))
        others = [
            (float(np.median(theirs)), other.label)
            for (other, same), theirs in known.items()
            if same == figure and other is not PENSTOCK and theirs
        ]
        peer = None
        if server is PENSTOCK and others and max(others)[0] > 0:
            best, label = max(others)
            peer = Comparison(name=label, median=best, ratio=median / best)
        described = f"{workload.label} served by {server.label} on one core, {workload.describe(figure)}"
        lines.append(
            make_measurement(
                measured,
                id=None,
                workload=described,
                metric=figure.metric,
                unit="requests/s",
                command=command,
                peer=peer,
            )
        )
    return lines


def ratios_of(workload: Workload, values: Values, raw: float, command: str) -> list[Measurement]:
    """Return the ratios of the targets: Penstock over the best peer of this run, repetition by repetition."""
    label = workload.label
    ratios: dict[str, tuple[list[float], str, Comparison | None]] = {}
    for figure, name in ((CLOSED, "closed_vs_best_peer"), (BEST, "goodput_vs_best_peer")):
        ours = values.get((PENSTOCK, figure), [])
        peers = {
            each: float(np.median(theirs))
            for (each, same), theirs in values.items()
            if same == figure and each in PEERS
        }
        if ours and peers:
            best = max(peers, key=lambda each: peers[each])
            theirs = values[best, figure]
            pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other > 0]
            peer = Comparison(name=best.label, median=peers[best], ratio=float(np.median(ours)) / peers[best])
            ratios[name] = pairs, f"{label}, {workload.describe(figure)}: {figure.metric}, over {best.label}", peer
    own = values.get((PENSTOCK, BEST), [])
    for figure, name in zip(OVERLOADED, ("overload_1_5x", "overload_3x"), strict=True):
        overloaded = zip(values.get((PENSTOCK, figure), []), own, strict=False)
        pairs = [over / best for over, best in overloaded if best > 0 and not math.isnan(over)]
        ratios[name] = pairs, f"{label}, {workload.describe(figure)}: {figure.metric}, over its own best rate", None
    if raw > 0:
        ratios["goodput_over_raw"] = (
            [rate / raw for rate in own],
            f"{label}: {BEST.metric}, over the network alone",
            None,
        )
    targets = {target.id for target in read_targets()} if workload.has_targets else set[str]()
    lines: list[Measurement] = []
    for name, (measured, described, peer) in ratios.items():
        target = f"server.{workload.model}.{name}"
        if measured:
            lines.append(
                make_measurement(
                    measured,
                    id=target if target in targets else None,
                    workload=described,
                    metric="ratio",
                    unit="ratio",
                    command=command,
                    peer=peer,
                )
            )
    return lines


def raw_rate(bundle: Path) -> float:
    """Return the best rate of the network alone on the server's core within the budget, in rows a second."""
    os.sched_setaffinity(0, {SERVER_CORE})
    try:
        network = Network(bundle)
        example = read_bundle(bundle).golden.inputs[:1]
        rates = [0.0]
        for size in SIZES:
            chunk_B = np.repeat(example, size, 0)
            times_s = [_seconds(network, chunk_B) for _ in range(RAW_RUNS)]
            if min(times_s) <= BUDGET_MS / 1e3:
                rates.append(size / float(np.median(times_s)))
        return max(rates)
    finally:
        os.sched_setaffinity(0, {SERVER_CORE, LOAD_CORE})


def _seconds(network: Network, chunk_B: Array) -> float:
    start_s = time.perf_counter()
    network.predict(chunk_B)
    return time.perf_counter() - start_s


def table_of(model: str, values: Values) -> Table:
    """Return a table of medians with the 10th and 90th percentile."""
    table = Table("server", title=f"{model}: requests/s, median (10th to 90th percentile)")
    for figure in FIGURES:
        table.add_column(figure.heading, justify="right")
    for server in dict.fromkeys(server for server, _ in values):
        cells: list[str] = []
        for figure in FIGURES:
            known = [value for value in values.get((server, figure), []) if not math.isnan(value)]
            low, median, high = np.percentile(known, (10, 50, 90)) if known else (math.nan,) * 3
            cells.append(f"{median:,.0f} ({low:,.0f} to {high:,.0f})" if known else "–")
        table.add_row(server.label, *cells)
    return table


def main() -> None:
    """Read the command line, compare, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.run", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a server's name; may be given several times")
    parser.add_argument("--model", choices=ONE_SHOT, action="append", help="both by default")
    parser.add_argument("--bundle", type=Path, help="another network; peers have the tuning of the cnn")
    parser.add_argument("--connections", type=int, default=OPEN_CONNECTIONS, help="of the open loops")
    parser.add_argument(
        "--sender", choices=KINDS, default="auto", help="auto is compiled where g++ or clang++ is there"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each load")
    parser.add_argument("--patience-s", type=float, default=60.0, help="longest wait for an idle machine")
    parser.add_argument("--out", type=Path, help="a file to which a JSON line for each server and figure is appended")
    parser.add_argument("--record", action="store_true", help="append the measurements to benchmarks/results")
    given = parser.parse_args()
    # SIGTERM ends the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    command = own_command()
    if given.bundle is not None:
        # The place of a user's files has no part in the result.
        words = shlex.split(command)
        at = next(place for place, word in enumerate(words) if word.startswith("--bundle"))
        words[at : at + (1 if "=" in words[at] else 2)] = ["--bundle", "BUNDLE"]
        command = shlex.join(words)
    try:
        servers = select_servers(given.only)
        for server in servers:
            make_environment(server, console.print)
        load = {"connections": given.connections, "seconds": given.seconds, "sender": given.sender}
        for workload in _workloads(given.model, given.bundle, load):
            model = workload.model
            values = compare(workload, servers, repeat=given.repeat, patience_s=given.patience_s, say=console.print)
            console.print(table_of(model, values))
            raw = raw_rate(workload.bundle)
            console.print(f"{model}: the network alone answers {raw:,.0f} rows/s in batches within the budget")
            lines = [*measurements_of(workload, values, command), *ratios_of(workload, values, raw, command)]
            for line in lines:
                if line.metric == "ratio":
                    console.print(f"{line.workload}: {line.median:.3f}")
                if given.record:
                    record_result(line, "server")
            if given.out is not None:
                with given.out.open("a") as sink:
                    sink.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
    except PenstockError as error:
        sys.exit(str(error))


def _workloads(models: Sequence[str] | None, bundle: Path | None, load: dict[str, Any]) -> Generator[Workload]:
    if bundle is not None:
        manifest = read_bundle(bundle).manifest
        rows = "; ".join(f"{spec.dtype} {[*spec.shape]}" for spec in manifest.inputs)
        yield Workload(model=manifest.name, tuning="cnn", bundle=bundle, rows=rows, **load)
        return
    for model in models or ONE_SHOT:
        written = write_bundle(model, HOME / "bundles" / model).folder
        yield Workload(model=model, tuning=model, bundle=written, **load)


if __name__ == "__main__":
    main()
