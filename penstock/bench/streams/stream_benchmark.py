"""The benchmark of live streams: latency at given numbers of streams, or the largest number within a budget."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np

from penstock.bench.compiled_program import SenderKind
from penstock.bench.measurement import Comparison, Measurement, make_measurement
from penstock.bench.server_process import ServerProcess, running_server
from penstock.bench.streams.stream_generator import (
    LATE_PERCENT,
    LEAST_LATE_MS,
    MAX_LATE,
    MIN_IDLE,
    PROTOCOLS,
    bundle_workload,
    describe,
    find_max_streams,
    measure_streams,
)
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamWorkload
from penstock.core.errors import BenchError
from penstock.core.wording.counted import counted

MAX_STREAMS = 40_000


@final
@dataclass(kw_only=True, slots=True)
class StreamBenchmark:
    """Trials against one server.

    Args:
        workload: Signals of the streams.
        bundle: The bundle to serve; None if `url` is given.
        seconds: Duration of each measurement.
        processes: Processes that send.
        cpus: Their cores; None for any.
        server_cpus: The server's cores.
        options: Options of the server that is started.
        url: Address of a running server; None to start one.
        within_ms: The latency budget.
        percentile: The percentile of the latency that must keep it.
        say: Called with a sentence after each trial.
        sender: `"python"`, `"compiled"` or `"auto"`.
        results: Results so far.
        kept: Those that the figure is made of.
    """

    workload: StreamWorkload
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
    sender: SenderKind = "python"
    results: list[StreamLoadResult] = field(default_factory=list[StreamLoadResult])
    kept: list[StreamLoadResult] = field(default_factory=list[StreamLoadResult])

    @property
    def idle(self) -> float:
        """Least idle share of the generator's cores in what the figure is made of; infinity if it was not measured."""
        return min([trial.idle for trial in self.kept if not math.isnan(trial.idle)], default=math.inf)

    @property
    def late_ms(self) -> float:
        """Largest p99 of the generator's own delay in what the figure is made of."""
        return max([trial.late_ms(LATE_PERCENT) for trial in self.kept], default=0.0)

    def measure_at(self, counts: list[int], repeat: int, sameness: bool = False) -> Measurement:
        """Measure the latency at given numbers of streams; return that of the last number.

        Raises:
            BenchError: A stream was not carried whole, or the load generator's cores were too busy.
        """
        values: list[float] = []
        with self._server() as server:
            for _ in range(repeat):
                trials = [self.measure(server, count) for count in counts]
                for trial in trials:
                    if not trial.complete:
                        raise BenchError(f"not every stream was carried: {describe(trial)}")
                values.append(trials[-1].difference if sameness else trials[-1].percentile_ms(self.percentile))
                self.kept += trials
                if not sameness:
                    self.check_generator()
        if sameness:
            return self._measurement(values, f"largest difference from offline at {counts[-1]:,} streams", "abs")
        return self._measurement(values, f"p{self.percentile:g} at {counts[-1]:,} streams", "ms")

    def find_max(self, repeat: int, first: int, *, naive: bool) -> Measurement:
        """Search the most streams that keep the budget; with `naive`, over those of one stream a step.

        Raises:
            BenchError: The load generator's cores were too busy.
        """
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeat):
            with self._server() as server:
                ours.append(self._find_max(server, first))
            if naive:
                self.say("one stream a step:")
                with self._server("--max-batch", "1") as server:
                    theirs.append(self._find_max(server, max(1, first // 4)))
        metric = f"streams with p{self.percentile:g} within {self.within_ms:g} ms"
        if not naive:
            return self._measurement(ours, metric, "streams")
        ratios = [our / max(their, 1.0) for our, their in zip(ours, theirs, strict=True)]
        peer = Comparison(
            name="the same server with one stream a step",
            median=float(np.median(theirs)),
            ratio=float(np.median(ratios)),
        )
        self.say(f"{metric}: {ours} and {theirs}")
        return self._measurement(ratios, f"{metric}, over one stream a step", "ratio", peer)

    def check_generator(self) -> None:
        """Check that the figure is not one of the load generator.

        Raises:
            BenchError: Its cores were idle for less than a fifth of the time, or it sent chunks late.
        """
        advice = (
            "its own delays may be part of it. Give it more cores, or cores of its own by --cpu and --server-cpu, or "
            "send fewer streams."
        )
        if self.idle < MIN_IDLE:
            raise BenchError(
                f"the load generator's cores were idle for {self.idle:.0%} of the time, and a figure needs "
                f"{MIN_IDLE:.0%}: {advice}"
            )
        allowed_ms = max(LEAST_LATE_MS, MAX_LATE * self.within_ms)
        if self.late_ms > allowed_ms:
            raise BenchError(
                f"the load generator sent chunks {self.late_ms:.2f} ms late (p99), and a figure within "
                f"{self.within_ms:g} ms allows {allowed_ms:g} ms: {advice}"
            )

    def draw(self, file: Path) -> Path:
        """Draw the latency over the number of streams."""
        from matplotlib.figure import Figure

        trials = sorted(self.results, key=lambda trial: trial.streams)
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

    def _measurement(self, values: list[float], metric: str, unit: str, peer: Comparison | None = None) -> Measurement:
        protocol = {"websocket": "WebSockets", "grpc": "gRPC"}[self.workload.protocol]
        if self.workload.per_connection > 1:
            protocol += f", {self.workload.per_connection:,} streams a connection,"
        chunks = f"chunks of {self.workload.period_s * 1e3:g} ms over {protocol} in real time"
        server = "another server" if self.url else f"server {' '.join(self.options)}"
        workload = f"{self.workload.model}, {chunks}, {server}"
        if "cuda" in self.options and (device := _gpu_name()):
            workload += f" on one {device}"
        return make_measurement(values, workload=workload, metric=metric, unit=unit, peer=peer)

    def _find_max(self, server: ServerProcess, first: int) -> float:
        best = find_max_streams(
            lambda count: self.measure(server, count),
            budget_ms=self.within_ms,
            percent=self.percentile,
            first=first,
            limit=MAX_STREAMS,
        )
        self.kept += [trial for trial in self.results if trial.streams == best]
        self.check_generator()
        idle = f"; the generator's cores were idle for {self.idle:.0%}" if math.isfinite(self.idle) else ""
        self.say(f"at most {counted(best, 'stream')} with p{self.percentile:g} within {self.within_ms:g} ms{idle}")
        return float(best)

    def measure(
        self, server: ServerProcess, count: int, counter: Callable[[], float] | None = None
    ) -> StreamLoadResult:
        """Measure a number of streams once.

        Args:
            server: The server.
            count: The number.
            counter: Read at the begin and at the end of the measurement; the result has the difference.
        """
        if self.url is None:
            server.start_sampling()
        workload = self.workload.at(server.stream_address)
        result = measure_streams(
            workload,
            count,
            seconds=self.seconds,
            processes=self.processes,
            cpus=self.cpus,
            sender=self.sender,
            counter=counter,
        )
        self.results.append(result)
        self.say(describe(result))
        if self.url is None:
            self.say(f"    {server.usage().description}")
        return result

    @contextmanager
    def _server(self, *more: str) -> Generator[ServerProcess]:
        if self.url is not None:
            yield ServerProcess(self.url, self.workload.model)
            return
        assert self.bundle is not None
        grpc = self.workload.protocol == "grpc"
        with running_server(self.bundle, [*self.options, *more], cpus=self.server_cpus, grpc=grpc) as server:
            yield server


def workload_for(
    bundle: Path | None,
    *,
    seconds: float,
    protocol: str = "websocket",
    url: str | None = None,
    model: str | None = None,
    rate_hz: float | None = None,
    frames: int | None = None,
    tolerance: float | None = None,
    per_connection: int = 1,
) -> StreamWorkload:
    """Make a workload from the options of the command line.

    Args:
        bundle: The bundle that gives the expected outputs; None to check nothing.
        protocol: One of `PROTOCOLS`.
        url: Address of a running server.
        model: Name of the model there.
        rate_hz: Frames a second, without a bundle.
        frames: Frames a chunk, without a bundle, if the model takes any number.
        seconds: Duration of the measurement.
        tolerance: The largest difference of a right output; by default the bundle's own.
        per_connection: Streams on one connection.

    Raises:
        BenchError: An option is missing, or contradicts another.
    """
    if protocol not in PROTOCOLS:
        raise BenchError(f"--protocol is {protocol!r}; it must be {' or '.join(PROTOCOLS)}.")
    if protocol == "grpc" and find_spec("grpc") is None:
        raise BenchError("--protocol grpc needs packages that are not installed; install penstock-nn[grpc].")
    if per_connection < 1 or (per_connection > 1 and protocol != "websocket"):
        raise BenchError(f"--per-connection is {per_connection}; it must be 1, or more with --protocol websocket.")
    if model is not None and url is None:
        raise BenchError("--model names a model of a running server; give its address by --url.")
    if bundle is not None:
        if rate_hz is not None or frames is not None:
            raise BenchError("the bundle sets --rate-hz and --frames; leave them out.")
        workload = bundle_workload(bundle, seconds=seconds, tolerance=tolerance, protocol=protocol, model=model)
        return replace(workload, per_connection=per_connection)
    if url is None or model is None or rate_hz is None or protocol != "grpc":
        raise BenchError("without a bundle, give --protocol grpc, --url, --model and --rate-hz.")
    from penstock.bench.streams.model_metadata import metadata_workload

    return metadata_workload(url, model, rate_hz=rate_hz, frames=frames, seconds=seconds)


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
