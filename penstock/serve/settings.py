"""Settings of a server, which all of its processes share."""

import importlib.util
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from penstock.core.errors import ServeError
from penstock.core.json_record import read_record
from penstock.core.remote.remote_cache import DEFAULT_LIMIT_BYTES
from penstock.serve.model_versions import VersionPolicy, parse_versions

# On so few cores, a separate front-end process costs more than it gains.
MAX_SHARED_CORES = 2
MAX_FRONTENDS = 64
MAX_ENGINES = 64
MAX_SHARED_MIB = 1 << 20
MAX_REPLAY_S = 3_600
MAX_LEAVE_S = 86_400
MAX_TICKET_S = 300
# Share of the latency budget that one poll may spend on reading sockets before it runs a batch.
READING_SHARE = 0.1
# By default, and at most. Two batches of a client that asks again at once are about a millisecond apart.
IDLE_POLL_MS, MAX_IDLE_POLL_MS = 2.0, 1000.0
# Of one engine; several joined by + share each network.
_DEVICE = re.compile(r"cpu(\+cpu)*|cuda(:\d{1,2})?|cuda:\d{1,2}(\+cuda:\d{1,2})+")
# The Origin header of browsers: lower case, no path, no default port.
_ORIGIN = re.compile(r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://[^/\sA-Z@]+")


def _choice(option: str, value: str, *known: str) -> tuple[bool, str]:
    return value in known, f"{option} is {value!r}; it must be {', '.join(known[:-1])} or {known[-1]}."


def _check(*rules: tuple[Any, str]) -> None:
    for holds, problem in rules:
        if not holds:
            raise ServeError(problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The models that are served.

    Args:
        bundles: Bundle folders.
        chains: References of chains, whose parts are among the models, see `find_chain`.
        directory: A model directory, a folder or a URL: all of its models are served, and may be loaded and unloaded by
            request.
        versions: Versions of the directory's models, see `parse_versions`; the newest by default.
        on_demand: Load each model of the directory when the first request for it comes.
        max_models: Models that may be loaded at once, by name; None for any number.
        memory_fraction: Share of a device's memory that may be in use when another model is loaded; None for all.
        app: Reference of the application, if it moved; for a single bundle.
        accept_changed_app: Accept an application whose sources changed, if the golden examples still agree.
        cache: The folder of downloads.
        cache_limit_bytes: Sum of the sizes of all downloads in it.
    """

    bundles: tuple[Path, ...] = ()
    chains: tuple[str, ...] = ()
    directory: Path | None = None
    versions: tuple[str, ...] = ()
    on_demand: bool = False
    max_models: int | None = None
    memory_fraction: float | None = None
    app: str | None = None
    accept_changed_app: bool = False
    cache: Path = Path("~/.cache/penstock")
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES

    def __post_init__(self) -> None:
        _check(
            (
                self.bundles or self.directory or not self.chains,
                f"{next(iter(self.chains), '')} is a file, and no bundle is named; give the folder that 'penstock "
                f"train' wrote, RUN/bundle, and beside the file of a chain those of its parts.",
            ),
            (self.bundles or self.directory, "no bundle is named; give the folder of one, or --models DIRECTORY."),
            (
                self.app is None or (len(self.bundles) == 1 and self.directory is None),
                "--app says where the application of one bundle is; serve that bundle alone.",
            ),
            (
                not self.versions or self.directory,
                "--versions chooses among those of a directory; give --models.",
            ),
            (
                not self.on_demand or self.directory,
                "--on-demand loads the models of a directory on first use; give --models.",
            ),
            (
                not (self.on_demand and self.chains),
                "--on-demand loads models on first use, and a chain needs all of its parts from the start; serve "
                "chains without it.",
            ),
            (
                self.on_demand or (self.max_models is None and self.memory_fraction is None),
                "--max-models and --memory-fraction limit what is loaded on first use; give --on-demand.",
            ),
            (
                self.max_models is None or self.max_models > len(self.bundles),
                f"--max-models is {self.max_models}; it must be more than {len(self.bundles)}, the number of bundles "
                f"named, which are always loaded.",
            ),
            (
                self.memory_fraction is None or 0 < self.memory_fraction <= 1,
                f"--memory-fraction is {self.memory_fraction}; it must be above 0, to 1.",
            ),
        )
        parse_versions(self.versions)

    @property
    def policies(self) -> dict[str, VersionPolicy]:
        """The versions by model; under the empty name those of all others."""
        return parse_versions(self.versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """Listening addresses and TLS.

    Args:
        host: The address to listen on.
        port: The port; 0 takes a free one.
        grpc_port: The gRPC port; 0 takes a free one, None disables gRPC.
        agent_port: The port of HAProxy's agent checks; 0 takes a free one, None disables them.
        tls_certificate: A file with the certificate chain, PEM; None disables TLS.
        tls_key: A file with its private key, PEM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    agent_port: int | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        _check(
            (0 <= self.port <= 65535, f"--port is {self.port}; it must be from 0 to 65535."),
            (0 <= (self.grpc_port or 0) <= 65535, f"--grpc-port is {self.grpc_port}; it must be from 0 to 65535."),
            (0 <= (self.agent_port or 0) <= 65535, f"--agent-port is {self.agent_port}; it must be from 0 to 65535."),
            *(
                (not port or port != other, f"{option} is {port}, which is also {its}; choose another one.")
                for option, port, its, other in (
                    ("--grpc-port", self.grpc_port, "--port", self.port),
                    ("--agent-port", self.agent_port, "--port", self.port),
                    ("--agent-port", self.agent_port, "--grpc-port", self.grpc_port),
                )
            ),
            (
                (self.tls_certificate is None) == (self.tls_key is None),
                "TLS needs both --tls-certificate and --tls-key.",
            ),
            (
                self.grpc_port is None or importlib.util.find_spec("grpc"),
                "--grpc-port needs packages that are not there; install penstock-nn[grpc].",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessSettings:
    """Clients that may send requests.

    Args:
        api_keys: A file of API keys; None admits every client.
        cors: Origins whose pages may send requests; `"*"` for all.
        examples: Whether clients get golden examples, which come from the validation data.
        shared_memory: MiB of system shared memory that local clients may register; 0 refuses it.
        regions: The folder of registered regions, made by `serve`; None where shared memory is refused.
        max_streams_per_key: Live streams of one API key's owner, over all front-ends; None for any number.
        max_streams_per_address: Live streams of one client address, over all front-ends; None for any number.
        client_counts: The file of the counts of both, made by `serve`; None where a single front-end counts.
        ticket_keys: Files with the keys of live streams' tickets, the one that seals first; none without tickets.
    """

    api_keys: Path | None = None
    cors: tuple[str, ...] = ()
    examples: bool = True
    shared_memory: int = 0
    regions: Path | None = None
    max_streams_per_key: int | None = None
    max_streams_per_address: int | None = None
    client_counts: Path | None = None
    ticket_keys: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        invalid = ", ".join(repr(site) for site in self.cors if site != "*" and not _ORIGIN.fullmatch(site))
        _check(
            (
                not invalid,
                f"--cors is {invalid}; it must be * or what a browser sends as Origin, such as https://site.example.",
            ),
            (
                0 <= self.shared_memory <= MAX_SHARED_MIB,
                f"--shared-memory is {self.shared_memory}; it must be from 0 to {MAX_SHARED_MIB:,} MiB.",
            ),
            *(
                (limit is None or limit >= 1, f"--max-streams-per-{what} is {limit}; it must be at least 1.")
                for what, limit in (("key", self.max_streams_per_key), ("address", self.max_streams_per_address))
            ),
            (
                self.max_streams_per_key is None or self.api_keys,
                "--max-streams-per-key counts by API key; give --api-keys, or take --max-streams-per-address.",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    """Limits of connections and requests, and timeouts.

    Args:
        max_connections: Connections of one front-end; a further one takes the place of one that does nothing, or
            answers a health probe or 503, and is closed.
        max_unfinished_mib: MiB of the requests of one front-end that have not come whole, and of its connections.
        max_headers: Headers of one request.
        idle_timeout_s: A connection without a request is closed after this time.
        request_timeout_s: A request whose next bytes do not arrive within this time is refused.
        head_timeout_s: A request whose head is not whole this time after its first byte is refused.
        body_timeout_s: A request whose body is not whole this time after its head is refused.
        watchdog_s: An engine or front-end without a heartbeat for this time, plus the time of a batch, is replaced.
        leave_s: Time after SIGTERM in which the server is not ready and goes on, so that load balancers see it.
        drain_timeout_s: Time for accepted requests after that.
        load_timeout_s: A model is refused whose trial, or one step of whose loading, takes longer.
        replay_s: Signal of a live stream that is kept, so that another engine can go on with it; 0 for none.
        resume_timeout_s: A live stream whose engine has died is closed if none goes on with it within this time.
        ticket_s: Signal of a live stream between two of its tickets, in seconds.
    """

    max_connections: int = 10_000
    max_unfinished_mib: int = 256
    max_headers: int = 64
    idle_timeout_s: float = 120.0
    request_timeout_s: float = 20.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    watchdog_s: float = 30.0
    leave_s: float = 0.0
    drain_timeout_s: float = 10.0
    load_timeout_s: float = 300.0
    replay_s: float = 60.0
    resume_timeout_s: float = 30.0
    ticket_s: float = 5.0

    def __post_init__(self) -> None:
        _check(
            (self.max_connections >= 1, f"--max-connections is {self.max_connections}; it must be at least 1."),
            (
                1 <= self.max_unfinished_mib <= MAX_SHARED_MIB,
                f"--max-unfinished-mib is {self.max_unfinished_mib}; it must be from 1 to {MAX_SHARED_MIB:,} MiB.",
            ),
            (self.max_headers >= 8, f"--max-headers is {self.max_headers}; it must be at least 8."),
            (
                self.idle_timeout_s > 0 and self.request_timeout_s > 0,
                f"--idle-timeout-s is {self.idle_timeout_s:g} and --request-timeout-s is {self.request_timeout_s:g}; "
                f"both must be above 0.",
            ),
            (
                self.head_timeout_s > 0 and self.body_timeout_s > 0,
                f"--head-timeout-s is {self.head_timeout_s:g} and --body-timeout-s is {self.body_timeout_s:g}; both "
                f"must be above 0.",
            ),
            (
                self.watchdog_s >= 3,
                f"--watchdog-s is {self.watchdog_s:g}; it must be at least 3: processes send a heartbeat each second.",
            ),
            (
                0 <= self.leave_s <= MAX_LEAVE_S,
                f"--leave-s is {self.leave_s:g}; it must be from 0 to {MAX_LEAVE_S:,} seconds.",
            ),
            (self.load_timeout_s > 0, f"--load-timeout-s is {self.load_timeout_s:g}; it must be above 0."),
            (
                0 <= self.replay_s <= MAX_REPLAY_S,
                f"--replay-s is {self.replay_s:g}; it must be from 0, which keeps nothing, to {MAX_REPLAY_S:,}.",
            ),
            (
                0 < self.resume_timeout_s <= MAX_REPLAY_S,
                f"--resume-timeout-s is {self.resume_timeout_s:g}; it must be above 0, to {MAX_REPLAY_S:,}.",
            ),
            (
                0 < self.ticket_s <= MAX_TICKET_S,
                f"--ticket-s is {self.ticket_s:g}; it must be above 0, to {MAX_TICKET_S}.",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The latency budget and the batch size.

    Args:
        latency_ms: Latency budget of a request that names none.
        max_batch: A limit of the batch below what the budget allows; None for no other.
        stream_headroom: Share of the live streams that the costs allow which new ones leave free, for the streams of
            another engine that dies.
        idle_poll_ms: Time after its last batch in which an engine polls instead of sleeping, and in which a front-end
            does so for its results; None to choose by device and cores.
    """

    latency_ms: float = 50.0
    max_batch: int | None = None
    stream_headroom: float = 0.0
    idle_poll_ms: float | None = None

    def __post_init__(self) -> None:
        _check(
            (0 < self.latency_ms <= 600_000, f"--latency-ms is {self.latency_ms:g}; it must be above 0, to 600,000."),
            (self.max_batch is None or self.max_batch >= 1, f"--max-batch is {self.max_batch}; it must be at least 1."),
            (
                0 <= self.stream_headroom <= 0.9,
                f"--stream-headroom is {self.stream_headroom:g}; it must be from 0 to 0.9.",
            ),
            (
                self.idle_poll_ms is None or 0 <= self.idle_poll_ms <= MAX_IDLE_POLL_MS,
                f"--idle-poll-ms is {self.idle_poll_ms}; it must be from 0 to {MAX_IDLE_POLL_MS:g}.",
            ),
        )

    @property
    def budget_ns(self) -> int:
        """Latency budget of a request that names none."""
        return int(self.latency_ms * 1e6)

    @property
    def max_read_ns(self) -> int:
        """Time that a poll may read sockets before it runs a batch."""
        return int(self.budget_ns * READING_SHARE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSettings:
    """Device, executor and precision of the networks.

    Args:
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:N"`; or several of the last three, separated by commas, with an
            engine each. Devices joined by `+` are those of one engine, whose networks are split over them.
        executor: Executor on a CPU: `"auto"`, `"onnx"` or `"torch"`.
        precision: `"fp32"`; on a GPU also `"tf32"`, `"bf16"` or `"fp16"`. `"auto"` is fp32 on a CPU, and on a GPU the
            fastest whose golden answers hold.
        compile: On a GPU, compile networks while they are already served.
        exact: Make an answer bitwise independent of the other rows of its batch.
        graph_memory: Share of a GPU's free memory for the CUDA graphs of networks whose inputs vary in length.
        cache: The folder of exported graphs.
    """

    device: str = "auto"
    executor: str = "auto"
    precision: str = "auto"
    compile: bool = True
    exact: bool = False
    graph_memory: float = 0.3
    cache: Path = Path("~/.cache/penstock")

    def __post_init__(self) -> None:
        _check(
            (
                self.device == "auto" or all(map(_DEVICE.fullmatch, self.devices)),
                f"--device is {self.device!r}; it must be auto, cpu, cuda or cuda:N, or several such as cuda:0,cuda:1 "
                f"(an engine each) or cuda:0+cuda:1 (one engine, whose networks are split).",
            ),
            (
                all(each.startswith("cpu") or len({*each.split("+")}) == each.count("+") + 1 for each in self.devices),
                f"--device is {self.device!r}, which names a GPU twice for one engine; name each once.",
            ),
            (
                len(self.devices) <= MAX_ENGINES,
                f"--device names {len(self.devices)} devices; it must be {MAX_ENGINES} at most.",
            ),
            _choice("--executor", self.executor, "auto", "onnx", "torch"),
            _choice("--precision", self.precision, "auto", "fp32", "tf32", "bf16", "fp16"),
            (
                0 < self.graph_memory <= 0.9,
                f"--graph-memory is {self.graph_memory:g}; it must be above 0, to 0.9 of the free memory.",
            ),
            (
                all(each.startswith(("auto", "cpu")) for each in self.devices) or self.executor == "auto",
                f"--executor {self.executor} is for a CPU, and --device is {self.device}; leave one of them out.",
            ),
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each engine."""
        return tuple(self.device.split(","))

    @property
    def has_processes(self) -> bool:
        """True if the engine is never in the process of a front-end: there are several, or several devices of one."""
        return "," in self.device or "+" in self.device


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetrySettings:
    """Logging and tracing.

    Args:
        log_format: `"text"` or `"json"`.
        log_requests: Log a line for each request.
        verbose: Log measurements and choices.
        load_report: Form of the load report that each answer carries: `"text"`, `"json"` or `"bin"`; None for one only
            where a request asks for it.
        otlp_endpoint: URL of an OpenTelemetry collector, OTLP over HTTP; None disables traces.
        trace_share: Sampling probability of a request whose caller did not decide, above 0, up to 1.
    """

    log_format: str = "text"
    log_requests: bool = False
    verbose: bool = False
    load_report: str | None = None
    otlp_endpoint: str | None = None
    trace_share: float = 0.01

    def __post_init__(self) -> None:
        _check(
            _choice("--log-format", self.log_format, "text", "json"),
            _choice("--load-report", self.load_report or "text", "text", "json", "bin"),
            (
                self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://")),
                f"--otlp-endpoint is {self.otlp_endpoint!r}; it must be a URL, such as http://127.0.0.1:4318.",
            ),
            (0 < self.trace_share <= 1, f"--trace-share is {self.trace_share:g}; it must be above 0, to 1."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a server.

    Args:
        models: What is served.
        network: Listening addresses and TLS.
        access: Clients that may send requests.
        limits: Limits and timeouts.
        batching: Latency budget and batch size.
        execution: Device, executor and precision.
        telemetry: Logging and tracing.
        frontends: Front-end processes; 0 for one in the process of the only engine, None to choose by the cores.
    """

    models: ModelSettings
    network: NetworkSettings = NetworkSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    batching: BatchSettings = BatchSettings()
    execution: ExecutionSettings = ExecutionSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    frontends: int | None = None

    def __post_init__(self) -> None:
        devices = len(self.execution.device.replace("+", ",").split(","))
        _check(
            (
                self.frontends is None or 0 <= self.frontends <= MAX_FRONTENDS,
                f"--frontends is {self.frontends}; it must be from 0 to {MAX_FRONTENDS}.",
            ),
            (
                not self.execution.has_processes or self.frontends != 0,
                f"--frontends is 0, and each of the {devices} devices of --device has a process of its own; take at "
                f"least 1, or leave it out.",
            ),
        )

    @property
    def has_stream_quotas(self) -> bool:
        """True if the streams of one client are limited."""
        access = self.access
        return access.max_streams_per_key is not None or access.max_streams_per_address is not None

    @property
    def frontend_processes(self) -> int:
        """Separate front-end processes; 0 where the front-end shares the process of the engine."""
        if self.frontends is not None:
            return self.frontends
        cores = len(os.sched_getaffinity(0))
        if cores <= MAX_SHARED_CORES:
            return 1 if self.execution.has_processes else 0
        return min(4, cores // 2)

    def idle_poll_ns(self, device: str) -> int:
        """Return the time that an engine's process, and a front-end that waits for it, polls instead of sleeping.

        Args:
            device: The engine's device. On a CPU, the network needs the cores.
        """
        if self.batching.idle_poll_ms is not None:
            return int(self.batching.idle_poll_ms * 1e6)
        processes = self.frontend_processes + len(self.execution.devices)
        spare = len(os.sched_getaffinity(0)) > processes
        return int(IDLE_POLL_MS * 1e6) if spare and device.startswith("cuda") else 0

    def to_json(self) -> str:
        """Encode for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode what `to_json` wrote."""
        return read_record(cls, json.loads(text))
