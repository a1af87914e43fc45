"""How a server is started: what every one of its processes is told."""

import importlib.util
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from penstock.core.errors import ServeError

_PATHS = ("cache", "models", "api_keys", "tls_certificate", "tls_key")
# Up to so many cores, a process of its own for the front-end costs more than it gains.
CORES_SHARED = 2
MOST_FRONTENDS = 64
MOST_ENGINES = 64
# Of the budget: reading for so long, then running what was read.
READING_SHARE = 0.1
_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")
# What a browser sends as Origin: lower case, no path, no port that goes without saying.
_ORIGIN = re.compile(r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://[^/\sA-Z@]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How bundles are served.

    Args:
        bundles: Their folders.
        models: A model directory, whose models are all served, and may be loaded and unloaded by request.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        grpc_port: The port of gRPC; None for none.
        latency_ms: The budget of a request that names none, in milliseconds.
        max_batch: A limit of the batch below what the budget allows; None for no other.
        executor: What runs the networks on a CPU: `"auto"`, `"onnx"` or `"torch"`.
        device: Where networks run: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:N"`; or several of the last three with commas
            between them, each with an engine of its own.
        precision: `"fp32"`, or on a GPU `"bf16"` or `"fp16"`.
        exact: Whether an answer must be the same, bit for bit, whatever else is in its batch.
        cache: The folder where exported graphs are kept.
        app: Where the application is now, if it moved; for one bundle alone.
        accept_changed_app: Take an application whose sources changed, as long as the golden examples agree.
        frontends: Front-end processes; 0 for one that shares the only engine's process, None for what suits the
            machine.
        drain_s: How long accepted requests may take after SIGTERM, in seconds.
        api_keys: A file of the clients' keys; None lets everybody ask.
        cors: The sites whose pages may ask; `"*"` for all.
        tls_certificate: A file with the certificate chain, PEM; None for no TLS.
        tls_key: A file with its private key, PEM.
        max_connections: Of one front-end; a further one is closed at once.
        max_headers: Of one request.
        idle_s: A connection without a request is closed after so many seconds.
        begun_s: A request that has begun must come on within so many seconds.
        hangs_s: An engine or a front-end that does not move for so many seconds, besides those that a batch may take,
            is replaced.
        log_format: `"text"` or `"json"`.
        log_requests: Log a line for each request.
        otlp_endpoint: Where OpenTelemetry's collector takes traces over HTTP; None for no traces.
        trace_share: Of the requests that do not say themselves whether they are traced, from above 0 to 1.
        verbose: Log what was measured and chosen.
    """

    bundles: tuple[Path, ...] = ()
    models: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    latency_ms: float = 50.0
    max_batch: int | None = None
    executor: str = "auto"
    device: str = "auto"
    precision: str = "fp32"
    exact: bool = False
    cache: Path = Path("~/.cache/penstock")
    app: str | None = None
    accept_changed_app: bool = False
    frontends: int | None = None
    drain_s: float = 10.0
    api_keys: Path | None = None
    cors: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_connections: int = 10_000
    max_headers: int = 64
    idle_s: float = 120.0
    begun_s: float = 20.0
    hangs_s: float = 30.0
    log_format: str = "text"
    log_requests: bool = False
    otlp_endpoint: str | None = None
    trace_share: float = 0.01
    verbose: bool = False

    def __post_init__(self) -> None:
        strange = ", ".join(repr(site) for site in self.cors if site != "*" and not _ORIGIN.fullmatch(site))
        for good, problem in (
            (self.bundles or self.models, "no bundle is named; give the folder of one, or --models DIRECTORY."),
            (
                0 < self.latency_ms <= 600_000,
                f"--latency-ms is {self.latency_ms:g}; it must be above 0, to 600,000.",
            ),
            (
                self.device == "auto" or all(map(_DEVICE.fullmatch, self.devices)),
                f"--device is {self.device!r}; it must be auto, cpu, cuda or cuda:N, or several such as cuda:0,cuda:1.",
            ),
            (
                len(self.devices) <= MOST_ENGINES,
                f"--device names {len(self.devices)} devices; it must be {MOST_ENGINES} at most.",
            ),
            (
                len(self.devices) == 1 or self.frontends != 0,
                f"--frontends is 0, and each of the {len(self.devices)} devices of --device has a process of its own; "
                f"take at least 1, or leave it out.",
            ),
            (
                self.precision in ("fp32", "bf16", "fp16"),
                f"--precision is {self.precision!r}; it must be fp32, bf16 or fp16.",
            ),
            (
                {*self.devices} <= {"auto", "cpu"} or self.executor == "auto",
                f"--executor {self.executor} is for a CPU, and --device is {self.device}; leave one of them out.",
            ),
            (self.max_batch is None or self.max_batch >= 1, f"--max-batch is {self.max_batch}; it must be at least 1."),
            (0 <= self.port <= 65535, f"--port is {self.port}; it must be from 0 to 65535."),
            (0 <= (self.grpc_port or 0) <= 65535, f"--grpc-port is {self.grpc_port}; it must be from 0 to 65535."),
            (
                self.frontends is None or 0 <= self.frontends <= MOST_FRONTENDS,
                f"--frontends is {self.frontends}; it must be from 0 to {MOST_FRONTENDS}.",
            ),
            (
                self.app is None or (len(self.bundles) == 1 and self.models is None),
                "--app says where the application of one bundle is; serve that bundle alone.",
            ),
            (
                (self.tls_certificate is None) == (self.tls_key is None),
                "TLS needs both --tls-certificate and --tls-key.",
            ),
            (self.max_connections >= 1, f"--max-connections is {self.max_connections}; it must be at least 1."),
            (self.max_headers >= 8, f"--max-headers is {self.max_headers}; it must be at least 8."),
            (self.idle_s > 0 and self.begun_s > 0, "--idle-s and --begun-s must be above 0."),
            (
                self.hangs_s >= 3,
                f"--hangs-s is {self.hangs_s:g}; it must be at least 3: a sign of life comes each second.",
            ),
            (
                not strange,
                f"--cors is {strange}; it must be * or what a browser sends as Origin, such as https://site.example.",
            ),
            (
                self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://")),
                f"--otlp-endpoint is {self.otlp_endpoint!r}; it must be a URL, such as http://127.0.0.1:4318.",
            ),
            (0 < self.trace_share <= 1, f"--trace-share is {self.trace_share:g}; it must be above 0, to 1."),
            (self.log_format in ("text", "json"), f"--log-format is {self.log_format!r}; it must be text or json."),
            (
                self.grpc_port is None or importlib.util.find_spec("grpc"),
                "--grpc-port needs packages that are not there; install penstock[grpc].",
            ),
        ):
            if not good:
                raise ServeError(problem)

    @property
    def budget_ns(self) -> int:
        """The latency budget of a request that names none, in nanoseconds."""
        return int(self.latency_ms * 1e6)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the networks of each engine run."""
        return tuple(self.device.split(","))

    @property
    def longest_read_ns(self) -> int:
        """How long a poll may read sockets before what it brought is run, in nanoseconds."""
        return int(self.budget_ns * READING_SHARE)

    @property
    def frontend_processes(self) -> int:
        """Front-ends in processes of their own; 0 for one in the engine's."""
        if self.frontends is not None:
            return self.frontends
        cores = len(os.sched_getaffinity(0))
        if cores <= CORES_SHARED:
            return 0 if len(self.devices) == 1 else 1
        return min(4, cores // 2)

    def to_json(self) -> str:
        """All of it, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        read: dict[str, Any] = json.loads(text)
        assert read.keys() == {field.name for field in fields(cls)}, read.keys()
        read["bundles"] = tuple(map(Path, read["bundles"]))
        read["cors"] = tuple(read["cors"])
        for name in _PATHS:
            read[name] = None if read[name] is None else Path(read[name])
        return cls(**read)
