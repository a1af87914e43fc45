"""Live streams in real time: Penstock beside Triton's sequence batcher; one core for the server, another for the load.

python -m benchmarks.peers.streams [--only NAME ...] [--model murmur|keywords] [--first N ...] [--repeat 1]
    [--sender auto] [--record]

Every server runs the same network and chooses its batches. The figure is the largest number of complete streams with a
percentile of the latency within a budget. Outputs that differ from the network's offline ones end the run.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.report.results import record_result
from benchmarks.models.write import LIVE, write_bundle
from benchmarks.peers.peer_process import is_listening, make_environment, running, wait_until_quiet
from benchmarks.peers.servers import CACHE, HOME, ROOT, ComparedServer, select_servers
from penstock.bench.compiled_program import KINDS, SenderKind, checked_kind
from penstock.bench.measurement import Comparison, Measurement, make_measurement, own_command
from penstock.bench.streams.stream_generator import bundle_workload, describe, find_max_streams, measure_streams
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamWorkload, address_of
from penstock.core.errors import BenchError, PenstockError

SERVER_CORE, LOAD_CORE = 0, 1
MAX_STREAMS = 4096
# A crashed server is started again: the comparison is of capacity.
ATTEMPTS = 3
(TRITON,) = select_servers(["triton"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedStreamServer:
    """One server.

    Args:
        name: Its name on the command line.
        label: Its name in tables.
        protocol: Protocol of its streams.
        options: Its options; those of peers were tuned by hand.
        peer: The peer whose environment it runs in; None for Penstock.
    """

    name: str
    label: str
    protocol: str
    options: tuple[str, ...]
    peer: ComparedServer | None = None

    @property
    def environment(self) -> Path:
        """Its virtual environment; its log is beside it."""
        return HOME / "penstock" if self.peer is None else self.peer.environment

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """Return the command that serves a bundle, with the streams' protocol on a port."""
        if self.peer is not None:
            server = self.peer.folder / "sequence_server.py"
            return [str(self.environment / "bin/python"), str(server), str(bundle), f"--port={port}", *self.options]
        ports = ["--port", str(port)] if self.protocol == "websocket" else ["--port", "0", "--grpc-port", str(port)]
        return [str(ROOT / ".venv/bin/penstock"), "serve", str(bundle), *ports, "--cache", str(CACHE), *self.options]


def servers(within_ms: float) -> tuple[ComparedStreamServer, ...]:
    """Return the compared servers for a latency budget, Penstock first."""
    own = "--device", "cpu", "--frontends", "0", "--latency-ms", f"{within_ms:g}"
    batcher = "Triton's sequence batcher"
    return (
        ComparedStreamServer(name="penstock", label="Penstock", protocol="websocket", options=own),
        ComparedStreamServer(name="penstock-grpc", label="Penstock over gRPC", protocol="grpc", options=own),
        ComparedStreamServer(
            name="triton", label=f"{batcher} (oldest)", protocol="grpc", peer=TRITON, options=("--strategy=oldest",)
        ),
        ComparedStreamServer(
            name="triton-direct",
            label=f"{batcher} (direct)",
            protocol="grpc",
            peer=TRITON,
            options=("--strategy=direct",),
        ),
    )


def select_stream_servers(names: Sequence[str], within_ms: float) -> tuple[ComparedStreamServer, ...]:
    """Return the servers of these names; all if there are none.

    Raises:
        BenchError: There is no such server.
    """
    known = {server.name: server for server in servers(within_ms)}
    for name in names:
        if name not in known:
            raise BenchError(f"there is no server {name!r} to compare; choose of {', '.join(known)}.")
    return tuple(known[name] for name in names or known)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSearch:
    """A search for the most streams of a server.

    Args:
        bundle: The bundle to serve.
        workload: Signals of the streams.
        seconds: Duration of each measurement.
        within_ms: The latency budget.
        percentile: The percentile of the latency that must keep it.
        say: Called with a sentence for each trial.
        sender: Sender of streams over WebSockets; the others are sent by Python.
    """

    bundle: Path
    workload: StreamWorkload
    seconds: float
    within_ms: float
    percentile: float
    say: Callable[[str], None]
    sender: SenderKind = "python"

    @property
    def metric(self) -> str:
        """The meaning of the figures."""
        return f"streams with p{self.percentile:g} within {self.within_ms:g} ms"

    def find_max(self, server: ComparedStreamServer, first: int) -> int:
        """Search the most streams that a server carries within the budget.

        Raises:
            BenchError: Its outputs are wrong, or it did not start.
        """
        with ExitStack() as running_now:

            def start() -> StreamWorkload:
                port = running_now.enter_context(running(server, self.workload.model, self.bundle, SERVER_CORE))
                return replace(self.workload, url=f"127.0.0.1:{port}", protocol=server.protocol)

            workload = start()
            sender = self.sender if server.protocol == "websocket" else "python"

            def measure(count: int) -> StreamLoadResult:
                nonlocal workload
                for _ in range(ATTEMPTS):
                    result = measure_streams(
                        workload, count, seconds=self.seconds, cpus=frozenset({LOAD_CORE}), sender=sender
                    )
                    self.say(f"  {describe(result)}")
                    if is_listening(*address_of(workload.url)):
                        return result
                    self.say(f"  {server.label} crashed and is started again")
                    running_now.close()
                    workload = start()
                raise BenchError(f"{server.label} crashed {ATTEMPTS} times at {count:,} streams.")

            best = find_max_streams(
                measure,
                budget_ms=self.within_ms,
                percent=self.percentile,
                first=first,
                limit=MAX_STREAMS,
            )
        self.say(f"{server.label}: at most {best:,} {self.metric}")
        return best


Values = Mapping[ComparedStreamServer, list[float]]


def compare(
    search: StreamSearch, compared: Sequence[ComparedStreamServer], firsts: Sequence[int], repeat: int
) -> Values:
    """Measure every server, repeated and interleaved."""
    values: dict[ComparedStreamServer, list[float]] = {each: [] for each in compared}
    for _ in range(repeat):
        for each, first in zip(compared, firsts, strict=True):
            wait_until_quiet(60.0, search.say)
            values[each].append(float(search.find_max(each, first)))
    return values


def measurements_of(search: StreamSearch, values: Values, command: str, figure: str | None) -> list[Measurement]:
    """Return a measurement for each server; Penstock's beside the best peer.

    Args:
        search: The search.
        values: Its results.
        command: The command that repeats it.
        figure: The target that Penstock's streams over WebSockets answer, or None.
    """
    medians = {each: float(np.median(measured)) for each, measured in values.items()}
    peers = {each: median for each, median in medians.items() if each.peer is not None and median > 0}
    chunks = f"chunks of {search.workload.period_s * 1e3:g} ms"
    lines: list[Measurement] = []
    for each, measured in values.items():
        beside = None
        if each.peer is None and peers:
            best = max(peers, key=lambda peer: peers[peer])
            beside = Comparison(name=best.label, median=peers[best], ratio=medians[each] / peers[best])
        over = "WebSockets" if each.protocol == "websocket" else "gRPC"
        workload = f"{search.workload.model} served by {each.label} on one core, {chunks} over {over} in real time"
        answers = figure if each.peer is None and each.protocol == "websocket" else None
        line = make_measurement(
            measured, id=answers, workload=workload, metric=search.metric, unit="streams", command=command, peer=beside
        )
        lines.append(line)
    return lines


def table_of(search: StreamSearch, values: Values) -> Table:
    """Return a table of the servers' streams, and their share of the first one's."""
    table = Table("server", title=f"{search.workload.model}: {search.metric}; median of the repetitions, and each")
    table.add_column("streams", justify="right")
    table.add_column("of the first", justify="right")
    first, *_ = (float(np.median(measured)) for measured in values.values())
    for each, measured in values.items():
        median = float(np.median(measured))
        share = f"{median / first:.0%}" if first else "–"
        table.add_row(each.label, f"{median:,.0f} ({', '.join(f'{value:,.0f}' for value in measured)})", share)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.streams", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a server's name; may be given several times")
    parser.add_argument("--model", choices=LIVE, default="murmur", help="served with random weights")
    parser.add_argument("--bundle", type=Path, help="a live application's bundle instead")
    parser.add_argument("--first", type=int, action="append", help="where the search begins; once, or for each server")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each number of streams is measured")
    parser.add_argument("--within-ms", type=float, default=20.0)
    parser.add_argument("--percentile", type=float, default=99.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--sender", choices=KINDS, default="auto", help="of streams over WebSockets")
    parser.add_argument("--figure", help="the id of the target that Penstock's own streams answer")
    parser.add_argument("--record", action="store_true", help="append the measurements to benchmarks/results")
    return parser.parse_args()


def _compared(given: argparse.Namespace, say: Callable[[str], None]) -> tuple[StreamSearch, Values]:
    compared = select_stream_servers(given.only, given.within_ms)
    firsts = given.first or [64]
    if len(firsts) == 1:
        firsts *= len(compared)
    if len(firsts) != len(compared):
        raise BenchError(
            f"--first is given {len(firsts)} times for {len(compared)} servers; give it once, or for each."
        )
    if any(each.peer is TRITON for each in compared):
        make_environment(TRITON, say)
    sender = checked_kind(given.sender)
    say(f"Streams over WebSockets are sent by the {sender} sender, those over gRPC by the python one.")
    bundle: Path = given.bundle or write_bundle(given.model, HOME / "bundles" / given.model).folder
    search = StreamSearch(
        bundle=bundle,
        workload=bundle_workload(bundle, seconds=given.seconds, tolerance=None),
        seconds=given.seconds,
        within_ms=given.within_ms,
        percentile=given.percentile,
        say=say,
        sender=sender,
    )
    return search, compare(search, compared, firsts, given.repeat)


def main() -> None:
    """Read the command line, compare, print and write."""
    given = _arguments()
    # SIGTERM ends the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    try:
        search, values = _compared(given, console.print)
    except PenstockError as error:
        sys.exit(str(error))
    console.print(table_of(search, values))
    if given.record:
        for line in measurements_of(search, values, own_command(), given.figure):
            record_result(line, "streams")


if __name__ == "__main__":
    main()
