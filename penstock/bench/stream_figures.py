"""Trials of live streams: at given numbers of them or in search of the most, drawn and kept as data."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np

from penstock.bench.results import Peer, append, line_of
from penstock.bench.stream_sender import PROTOCOLS
from penstock.bench.stream_server import StreamServer, serving
from penstock.bench.streams import Played, StreamsMeasured, described, measure_streams, most_streams, played_for
from penstock.core.errors import BenchError

# No more streams than this are tried.
MOST = 40_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is recorded.

    Args:
        values: Of the repetitions.
        metric: What a value is.
        unit: Its unit.
        peer: What it is compared with.
    """

    values: list[float]
    metric: str
    unit: str
    peer: Peer | None = None


@final
@dataclass(kw_only=True, slots=True)
class Trials:
    """The trials of one command.

    Args:
        played: What the streams send.
        bundle: What is served; None where `url` is given.
        seconds: How long each is measured.
        processes: Processes that play.
        cpus: Their cores; None for any.
        server_cpus: The server's cores.
        options: Of the server that is started.
        url: Of one that is running already; None to start one.
        within_ms: The latency budget.
        percentile: Of the latency, that counts.
        say: Called with a sentence after each trial.
        done: What was measured so far.
    """

    played: Played
    bundle: Path | None
    seconds: float
    processes: int
    cpus: frozenset[int] | None
    server_cpus: frozenset[int] | None
    options: tuple[str, ...]
    url: str | None
    within_ms: float
    percentile: float
    say: Callable[[str], None]
    done: list[StreamsMeasured] = field(default_factory=list[StreamsMeasured])

    def at(self, counts: list[int], repeat: int, sameness: bool = False) -> Found:
        """The latency at given numbers of streams; where there are several, that of the last is what is recorded."""
        values: list[float] = []
        with self._server() as server:
            for _ in range(repeat):
                each = [self._measured(server, count) for count in counts]
                for measured in each:
                    if not measured.whole:
                        raise BenchError(f"not every stream was carried: {described(measured)}")
                values.append(each[-1].difference if sameness else each[-1].percentile_ms(self.percentile))
        if sameness:
            return Found(values=values, metric=f"largest difference from offline at {counts[-1]:,} streams", unit="abs")
        return Found(values=values, metric=f"p{self.percentile:g} at {counts[-1]:,} streams", unit="ms")

    def most(self, repeat: int, first: int, *, naive: bool) -> Found:
        """The most streams that keep the budget; beside one stream a step, how many times as many."""
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeat):
            with self._server() as server:
                ours.append(self._most(server, first))
            if naive:
                self.say("one stream a step:")
                with self._server("--max-batch", "1") as server:
                    theirs.append(self._most(server, max(1, first // 4)))
        metric = f"streams with p{self.percentile:g} within {self.within_ms:g} ms"
        if not naive:
            return Found(values=ours, metric=metric, unit="streams")
        ratios = [our / max(their, 1.0) for our, their in zip(ours, theirs, strict=True)]
        peer = Peer(
            name="the same server with one stream a step",
            median=float(np.median(theirs)),
            ratio=float(np.median(ratios)),
        )
        self.say(f"{metric}: {ours} and {theirs}")
        return Found(values=ratios, metric=f"{metric}, over one stream a step", unit="ratio", peer=peer)

    def draw(self, file: Path) -> Path:
        """Draw the latency over the number of streams."""
        from matplotlib.figure import Figure

        trials = sorted(self.done, key=lambda trial: trial.streams)
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for percent in (50, 98, 99):
            axes.plot(
                [trial.streams for trial in trials],
                [trial.percentile_ms(percent) for trial in trials],
                marker="o",
                label=f"p{percent}",
            )
        axes.axhline(self.within_ms, color="grey", linestyle="--", label="budget")
        axes.set_xlabel("live streams")
        axes.set_ylabel("ms from a chunk's last sample to its result")
        axes.set_yscale("log")
        axes.legend()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
        return file

    def record(self, found: Found, id: str | None) -> None:
        """Keep a line of it."""
        over = {"websocket": "WebSockets", "grpc": "gRPC"}[self.played.protocol]
        chunks = f"chunks of {self.played.period_s * 1e3:g} ms over {over} in real time"
        server = "another server" if self.url else f"server {' '.join(self.options)}"
        workload = f"{self.played.model}, {chunks}, {server}"
        device = _gpu_name()
        if device and "cuda" in self.options:
            workload += f" on one {device}"
        line = line_of(found.values, id=id, workload=workload, metric=found.metric, unit=found.unit, peer=found.peer)
        append(line, "streams")

    def _most(self, server: StreamServer, first: int) -> float:
        def play(count: int) -> StreamsMeasured:
            return self._measured(server, count)

        best, _ = most_streams(
            play, budget_ms=self.within_ms, percent=self.percentile, first=first, most=MOST, say=lambda sentence: None
        )
        self.say(f"at most {best:,} streams with p{self.percentile:g} within {self.within_ms:g} ms")
        return float(best)

    def _measured(self, server: StreamServer, count: int) -> StreamsMeasured:
        played = self.played
        if self.url is None:
            server.begin()
        measured = measure_streams(
            played.at(server.streams_at), count, seconds=self.seconds, processes=self.processes, cpus=self.cpus
        )
        self.done.append(measured)
        self.say(described(measured))
        if self.url is None:
            used = server.used()
            mfu = _mfu(played.flop_a_second * count)
            self.say(f"    {used.described}" + (f"; stream-MFU {mfu:.1%}" if mfu and "cuda" in self.options else ""))
        return measured

    @contextmanager
    def _server(self, *more: str) -> Generator[StreamServer]:
        if self.url is not None:
            yield StreamServer(self.url, self.played.model)
            return
        assert self.bundle is not None
        grpc = self.played.protocol == "grpc"
        with serving(self.bundle, [*self.options, *more], self.server_cpus, grpc=grpc) as server:
            yield server


def played_as(
    bundle: Path | None,
    *,
    protocol: str,
    url: str | None,
    model: str | None,
    rate_hz: float | None,
    frames: int | None,
    seconds: float,
    tolerance: float | None,
) -> Played:
    """What streams play, as it is told on the command line.

    Args:
        bundle: Its network says what is right; None where nobody does.
        protocol: Of `PROTOCOLS`.
        url: Of a server that runs already.
        model: What that one calls the model.
        rate_hz: Without a bundle, frames of the signal in a second.
        frames: Without a bundle, frames of a chunk, where the server takes any.
        seconds: How long is measured.
        tolerance: The largest difference of a right output; by default the bundle's own.

    Raises:
        BenchError: Something is missing, or is told twice.
    """
    if protocol not in PROTOCOLS:
        raise BenchError(f"--protocol is {protocol!r}; it must be {' or '.join(PROTOCOLS)}.")
    if protocol == "grpc" and find_spec("grpc") is None:
        raise BenchError("--protocol grpc needs packages that are not there; install penstock[grpc].")
    if model is not None and url is None:
        raise BenchError("--model is of a server that runs; name that by --url.")
    if bundle is not None:
        if rate_hz is not None or frames is not None:
            raise BenchError("the bundle says what --rate-hz and --frames are; leave them out.")
        return played_for(bundle, seconds=seconds, tolerance=tolerance, protocol=protocol, model=model)
    if url is None or model is None or rate_hz is None or protocol != "grpc":
        raise BenchError("without a bundle, give --protocol grpc, --url, --model and --rate-hz.")
    from penstock.bench.stream_metadata import played_to

    return played_to(url, model, rate_hz=rate_hz, frames=frames, seconds=seconds)


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _mfu(flop_a_second: float) -> float | None:
    from penstock.models.flops import peak_flops

    peak = peak_flops(_gpu_name() or "", "bf16")
    return None if peak is None else flop_a_second / peak
