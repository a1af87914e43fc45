"""Live streams in real time: Penstock beside Triton's sequence batcher; one core for the server, another for the load.

python -m benchmarks.peers.streams [--only NAME ...] [--model murmur|keywords] [--first N ...] [--repeat 1] [--record]

Every server runs the same network, a chunk of as many streams at a time as it likes. The figure is the most streams
that are carried whole with a percentile of the latency within a budget; outputs that are not the network's own over the
whole signals end the run.
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

from benchmarks.models.write import LIVE, write_bundle
from benchmarks.peers.contestants import CACHE, HOME, ROOT, Contestant, chosen
from benchmarks.peers.processes import is_listening, make_environment, running, wait_until_quiet
from penstock.bench.results import Line, Peer, append, line_of
from penstock.bench.streams import (
    Played,
    StreamsMeasured,
    address_of,
    described,
    measure_streams,
    most_streams,
    played_for,
)
from penstock.core.errors import BenchError, PenstockError

SERVER_CORE, LOAD_CORE = 0, 1
MOST = 4096
# A server that crashes is given other chances: what is compared is what it carries.
ATTEMPTS = 3
(TRITON,) = chosen(["triton"])


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamContestant:
    """One server.

    Args:
        name: What it is called on the command line.
        label: What it is called in tables.
        protocol: In which it is spoken to.
        options: What it is started with; a peer's were found best by hand.
        peer: Whose environment it runs in; None for Penstock.
    """

    name: str
    label: str
    protocol: str
    options: tuple[str, ...]
    peer: Contestant | None = None

    @property
    def environment(self) -> Path:
        """Its virtual environment; its log lies beside it."""
        return HOME / "penstock" if self.peer is None else self.peer.environment

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """What starts it on a bundle, with its streams' protocol on a port."""
        if self.peer is not None:
            server = self.peer.folder / "sequence_server.py"
            return [str(self.environment / "bin/python"), str(server), str(bundle), f"--port={port}", *self.options]
        ports = ["--port", str(port)] if self.protocol == "websocket" else ["--port", "0", "--grpc-port", str(port)]
        return [str(ROOT / ".venv/bin/penstock"), "serve", str(bundle), *ports, "--cache", str(CACHE), *self.options]


def contestants(within_ms: float) -> tuple[StreamContestant, ...]:
    """Who is compared under a latency budget, Penstock first."""
    own = "--device", "cpu", "--frontends", "0", "--latency-ms", f"{within_ms:g}"
    batcher = "Triton's sequence batcher"
    return (
        StreamContestant(name="penstock", label="Penstock", protocol="websocket", options=own),
        StreamContestant(name="penstock-grpc", label="Penstock over gRPC", protocol="grpc", options=own),
        StreamContestant(
            name="triton", label=f"{batcher} (oldest)", protocol="grpc", peer=TRITON, options=("--strategy=oldest",)
        ),
        StreamContestant(
            name="triton-direct",
            label=f"{batcher} (direct)",
            protocol="grpc",
            peer=TRITON,
            options=("--strategy=direct",),
        ),
    )


def chosen_streams(names: Sequence[str], within_ms: float) -> tuple[StreamContestant, ...]:
    """The contestants of these names; all where there is none.

    Raises:
        BenchError: There is no such contestant.
    """
    known = {contestant.name: contestant for contestant in contestants(within_ms)}
    for name in names:
        if name not in known:
            raise BenchError(f"there is no server {name!r} to compare; choose of {', '.join(known)}.")
    return tuple(known[name] for name in names or known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is searched.

    Args:
        bundle: What is served.
        played: What the streams send.
        seconds: How long each number of streams is measured.
        within_ms: The latency budget.
        percentile: Of the latency, that must keep it.
        say: Called with a sentence for each trial.
    """

    bundle: Path
    played: Played
    seconds: float
    within_ms: float
    percentile: float
    say: Callable[[str], None]

    @property
    def metric(self) -> str:
        """What the figures are."""
        return f"streams with p{self.percentile:g} within {self.within_ms:g} ms"

    def most(self, contestant: StreamContestant, first: int) -> int:
        """The most streams that a server carries within the budget.

        Raises:
            BenchError: Its outputs are wrong, or it did not start.
        """
        with ExitStack() as server:

            def start() -> Played:
                port = server.enter_context(running(contestant, self.played.model, self.bundle, SERVER_CORE))
                return replace(self.played, url=f"127.0.0.1:{port}", protocol=contestant.protocol)

            played = start()

            def play(count: int) -> StreamsMeasured:
                nonlocal played
                for _ in range(ATTEMPTS):
                    measured = measure_streams(played, count, seconds=self.seconds, cpus=frozenset({LOAD_CORE}))
                    self.say(f"  {described(measured)}")
                    if is_listening(*address_of(played.url)):
                        return measured
                    self.say(f"  {contestant.label} crashed and is started again")
                    server.close()
                    played = start()
                raise BenchError(f"{contestant.label} crashed {ATTEMPTS} times at {count:,} streams.")

            best, _ = most_streams(
                play,
                budget_ms=self.within_ms,
                percent=self.percentile,
                first=first,
                most=MOST,
                say=lambda sentence: None,
            )
        self.say(f"{contestant.label}: at most {best:,} {self.metric}")
        return best


Values = Mapping[StreamContestant, list[float]]


def compare(search: Search, chosen: Sequence[StreamContestant], firsts: Sequence[int], repeat: int) -> Values:
    """The figure of every server, repeated and interleaved."""
    values: dict[StreamContestant, list[float]] = {each: [] for each in chosen}
    for _ in range(repeat):
        for each, first in zip(chosen, firsts, strict=True):
            wait_until_quiet(60.0, search.say)
            values[each].append(float(search.most(each, first)))
    return values


def lines_of(search: Search, values: Values, command: str, figure: str | None) -> list[Line]:
    """A line of data for each server; Penstock's beside the best peer's.

    Args:
        search: What was searched.
        values: What was found.
        command: The command that repeats it.
        figure: The id of the target that Penstock's own streams answer, or None.
    """
    medians = {each: float(np.median(measured)) for each, measured in values.items()}
    peers = {each: median for each, median in medians.items() if each.peer is not None and median > 0}
    chunks = f"chunks of {search.played.period_s * 1e3:g} ms"
    lines: list[Line] = []
    for each, measured in values.items():
        beside = None
        if each.peer is None and peers:
            best = max(peers, key=lambda peer: peers[peer])
            beside = Peer(name=best.label, median=peers[best], ratio=medians[each] / peers[best])
        over = "WebSockets" if each.protocol == "websocket" else "gRPC"
        workload = f"{search.played.model} served by {each.label} on one core, {chunks} over {over} in real time"
        answers = figure if each.peer is None and each.protocol == "websocket" else None
        line = line_of(
            measured, id=answers, workload=workload, metric=search.metric, unit="streams", command=command, peer=beside
        )
        lines.append(line)
    return lines


def table_of(search: Search, values: Values) -> Table:
    """What each server carries, over the first one's."""
    table = Table("server", title=f"{search.played.model}: {search.metric}; median of the repetitions, and each")
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
    parser.add_argument("--bundle", type=Path, help="a live application's, in its place")
    parser.add_argument("--first", type=int, action="append", help="where the search begins; once, or for each server")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each number of streams is measured")
    parser.add_argument("--within-ms", type=float, default=20.0)
    parser.add_argument("--percentile", type=float, default=99.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--figure", help="the id of the target that Penstock's own streams answer")
    parser.add_argument("--record", action="store_true", help="append the measurements to benchmarks/results")
    return parser.parse_args()


def _compared(given: argparse.Namespace, say: Callable[[str], None]) -> tuple[Search, Values]:
    chosen = chosen_streams(given.only, given.within_ms)
    firsts = given.first or [64]
    if len(firsts) == 1:
        firsts *= len(chosen)
    if len(firsts) != len(chosen):
        raise BenchError(f"--first is given {len(firsts)} times for {len(chosen)} servers; give it once, or for each.")
    if any(each.peer is TRITON for each in chosen):
        make_environment(TRITON, say)
    bundle: Path = given.bundle or write_bundle(given.model, HOME / "bundles" / given.model).folder
    search = Search(
        bundle=bundle,
        played=played_for(bundle, seconds=given.seconds, tolerance=None),
        seconds=given.seconds,
        within_ms=given.within_ms,
        percentile=given.percentile,
        say=say,
    )
    return search, compare(search, chosen, firsts, given.repeat)


def main() -> None:
    """Read the command line, compare, print and write."""
    given = _arguments()
    # The servers are ended on SIGTERM as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    try:
        search, values = _compared(given, console.print)
    except PenstockError as error:
        sys.exit(str(error))
    console.print(table_of(search, values))
    words = ["python -m benchmarks.peers.streams", *(word for word in sys.argv[1:] if word != "--record")]
    if given.record:
        for line in lines_of(search, values, " ".join(words), given.figure):
            append(line, "streams")


if __name__ == "__main__":
    main()
