"""`penstock serve`."""

import os
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.remote_arguments import bundle_at
from penstock.core.errors import ServeError
from penstock.core.remote.cache_variables import cache_limit_bytes, expanded_cache

LIMITS = "Limits and operation"
CACHE = Path("~/.cache/penstock")


@documented_with_urls("directory")
def serve(
    bundles: Annotated[list[str] | None, typer.Argument(metavar="BUNDLE|CHAIN.py...")] = None,
    directory: Annotated[Path | None, typer.Option("--models", metavar="DIR")] = None,
    versions: Annotated[list[str] | None, typer.Option(metavar="[NAME=]VERSIONS")] = None,
    on_demand: Annotated[bool, typer.Option("--on-demand")] = False,
    max_models: int | None = None,
    memory_fraction: float | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int | None = None,
    agent_port: Annotated[int | None, typer.Option(rich_help_panel=LIMITS)] = None,
    latency_ms: float = 50.0,
    max_batch: int | None = None,
    executor: str = "auto",
    device: Annotated[str, typer.Option(metavar="DEVICE[+DEVICE...][,DEVICE...]")] = "auto",
    precision: str = "auto",
    compile: bool = True,
    exact: bool = False,
    graph_memory: float = 0.3,
    cache: Annotated[Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE")] = CACHE,
    app: Annotated[str | None, typer.Option(metavar="REF")] = None,
    accept_changed_app: bool = False,
    frontends: int | None = None,
    leave_s: float = 0.0,
    drain_timeout_s: float = 10.0,
    api_keys: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN")] = None,
    examples: bool = True,
    shared_memory: Annotated[int, typer.Option(metavar="MIB")] = 0,
    max_streams_per_key: Annotated[int | None, typer.Option(rich_help_panel=LIMITS)] = None,
    max_streams_per_address: Annotated[int | None, typer.Option(rich_help_panel=LIMITS)] = None,
    ticket_keys: Annotated[list[Path] | None, typer.Option("--ticket-key", metavar="FILE")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    max_connections: Annotated[int, typer.Option(rich_help_panel=LIMITS)] = 10_000,
    stream_headroom: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 0.0,
    idle_poll_ms: float | None = None,
    replay_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 60.0,
    resume_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 30.0,
    ticket_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 5.0,
    max_unfinished_mib: Annotated[int, typer.Option(rich_help_panel=LIMITS)] = 256,
    max_headers: Annotated[int, typer.Option(rich_help_panel=LIMITS)] = 64,
    idle_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 120.0,
    request_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 20.0,
    head_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 10.0,
    body_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 120.0,
    watchdog_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 30.0,
    load_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 300.0,
    log_format: Annotated[str, typer.Option(rich_help_panel=LIMITS)] = "text",
    log_requests: Annotated[bool, typer.Option("--log-requests", rich_help_panel=LIMITS)] = False,
    load_report: Annotated[str | None, typer.Option(metavar="FORM", rich_help_panel=LIMITS)] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(metavar="URL", rich_help_panel=LIMITS)] = None,
    trace_share: Annotated[float, typer.Option(rich_help_panel=LIMITS)] = 0.01,
    verbose: Annotated[bool, typer.Option("--verbose", rich_help_panel=LIMITS)] = False,
) -> None:
    """Serve bundles over HTTP, batched under a latency budget. Nothing must be tuned.

    Args:
        bundles: Bundle folders, RUN/bundle, or URLs (s3://, hf://); files that declare a chain of them, chain.py.
        directory: Serve all models of this directory, a folder or a URL; load and unload them by request.
        versions: Versions of its models: newest, all, or numbers such as 2,3; for one model NAME=2. May be repeated.
        on_demand: Load each model of the directory when the first request for it comes.
        max_models: With --on-demand, unload the least recently used model where more would be loaded.
        memory_fraction: With --on-demand, the same where more of the device's memory would be in use.
        host: The address to listen on; 0.0.0.0 for all.
        port: The port; 0 takes a free one.
        grpc_port: Serve the Open Inference Protocol by gRPC on this port too; 0: a free one.
        agent_port: Tell HAProxy's agent checks on this port the state and the weight of this server; 0: a free one.
        latency_ms: The latency budget of a request that names none.
        max_batch: Limit batches to this many rows.
        executor: On a CPU: onnx or torch; auto takes onnx where the model exports, for streams if faster.
        device: cpu, cuda or cuda:N; several, as cuda:0,cuda:1, get an engine each; cuda:0+cuda:1 is
            one engine, whose networks are split over both. auto: a GPU where there is one.
        precision: fp32; on a GPU also tf32, bf16 or fp16, and auto takes the fastest whose golden answers hold.
        compile: On a GPU, compile networks while they are already served, and keep the result in the cache.
        exact: Pad all batches to one size: an answer does not depend, bitwise, on its batch.
        graph_memory: Share of a GPU's free memory for CUDA graphs where lengths vary.
        cache: The folder of exported networks and of downloads.
        app: The application's new place, if it moved.
        accept_changed_app: Accept an application whose sources changed.
        frontends: Front-end processes; 0: one in the only engine's process. Default: by the number of cores.
        leave_s: After SIGTERM, be not ready and go on for so long, so that load balancers see it; then drain.
        drain_timeout_s: Time for accepted requests after that.
        api_keys: Admit only clients with a key: lines 'NAME KEY [admin]'.
        cors: A site whose pages may send requests, or *; may be repeated.
        examples: Offer golden examples, which are validation data, to the page and other clients.
        shared_memory: Let local clients register this much of /dev/shm for tensors, as Triton does; 0: none.
        max_streams_per_key: Live streams that one API key's owner may hold at once. Default: any number.
        max_streams_per_address: Live streams of one client address; behind a proxy all share one. Default: any number.
        ticket_keys: Seal the states of live streams with this key, for clients whose server dies; given twice, the
            second one is that which the first replaces.
        tls_certificate: The certificate chain, PEM.
        tls_key: Its private key, PEM.
        max_connections: Connections of one front-end; fewer where the hard limit of open files leaves no room.
        stream_headroom: Share of the live streams that an engine can carry which new ones leave free, for those of
            another engine that dies.
        idle_poll_ms: Poll for so long after a batch of a GPU instead of sleeping, because a core that wakes up is slow;
            0: sleep at once. Default: 2 where the cores are more than the processes.
        replay_s: Keep so much of each live stream, so that another engine can go on where its own dies; 0: nothing.
        resume_timeout_s: Close a live stream of a dead engine that no other one goes on with in this time.
        ticket_s: Signal of a live stream between two of its tickets.
        max_unfinished_mib: MiB of one front-end's connections, of requests that have not come whole, and of what is
            kept of live streams.
        max_headers: Headers of one request.
        idle_timeout_s: Close a connection without a request.
        request_timeout_s: Refuse a request whose next bytes do not arrive.
        head_timeout_s: Refuse a request whose head does not come whole.
        body_timeout_s: Refuse a request whose body does not come whole.
        watchdog_s: Replace a process without a heartbeat.
        load_timeout_s: Refuse a model whose trial, or one step of whose loading, takes longer.
        log_format: text or json.
        log_requests: Log a line for each request.
        load_report: text, json or bin: send a load report (ORCA) with each answer, not only on request.
        otlp_endpoint: Send traces to this OpenTelemetry collector.
        trace_share: Traced share of the requests whose caller does not decide.
        verbose: Log measurements and choices.
    """
    if sys.platform != "linux":
        raise ServeError(
            f"penstock serve needs Linux, and this is {sys.platform}; run it in a container or a virtual machine."
        )
    cache = checked_cache(cache)
    named = bundles or []
    chains = [each for each in named if is_chain(each)]
    folders = [bundle_at(each, cache) for each in named if not is_chain(each)]
    options = locals() | {"bundles": folders or None, "chains": chains, "regions": None}
    options["client_counts"] = None
    options |= {"cache_limit_bytes": cache_limit_bytes()}
    if exact:
        # Set before torch is loaded, here or in a child: matrix products must not depend on memory alignment.
        os.environ["MKL_CBWR"] = "AVX2,STRICT"
    from penstock.core.json_record import read_record
    from penstock.serve.observe.logs import set_up_logging
    from penstock.serve.server import serve as serve_bundles
    from penstock.serve.settings import Settings

    settings = read_record(Settings, _nested(Settings, options))
    set_up_logging(settings.telemetry, "penstock")
    serve_bundles(settings)


def checked_cache(given: Path) -> Path:
    """Return the cache folder. It need not exist, nor be writable: the graphs in it are read.

    Raises:
        ServeError: The path, or one above it, is not a folder, unless it is the default.
        StorageError: Its home folder is not known.
    """
    cache = expanded_cache(given)
    # Not every server needs a cache: the account of a service may have no home.
    for place in () if given == CACHE else (cache, *cache.parents):
        # Not `Path.exists`, which raises for what may not be looked at.
        if os.path.lexists(place) and not os.path.isdir(place):
            raise ServeError(f"the cache {cache} cannot be made: {place} is no folder; name another one with --cache.")
    return cache


def is_chain(argument: str) -> bool:
    """True for the file of a chain, `chain.py` or `chain.py:attr`, and not for the folder of a bundle."""
    return argument.endswith(".py") or ".py:" in argument


def _nested(record: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Sort options into the nested records of the settings whose fields have their names."""
    fields = {
        name: _nested(kind, options) if is_dataclass(kind) else options[name]
        for name, kind in get_type_hints(record).items()
    }
    return {name: value for name, value in fields.items() if value is not None}
