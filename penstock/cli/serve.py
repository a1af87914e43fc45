"""`penstock serve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

LIMITS = "Limits and operation"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    bundles: Annotated[
        list[Path] | None, typer.Argument(metavar="BUNDLE...", help="Bundle folders, RUN/bundle.")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Serve all models of this directory; load and unload them by request."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(help="Serve the Open Inference Protocol by gRPC on this port too; 0: a free one."),
    ] = None,
    latency_ms: Annotated[float, typer.Option(help="The latency budget of a request that names none.")] = 50.0,
    max_batch: Annotated[int | None, typer.Option(help="Limit batches to this many rows.")] = None,
    executor: Annotated[
        str,
        typer.Option(help="On a CPU: onnx or torch; auto takes onnx where the model exports, for streams if faster."),
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE[,DEVICE...]",
            help="cpu, cuda or cuda:N; several, as cuda:0,cuda:1, get an engine each. auto: a GPU where there is one.",
        ),
    ] = "auto",
    precision: Annotated[str, typer.Option(help="fp32; on a GPU also bf16 or fp16.")] = "fp32",
    exact: Annotated[
        bool, typer.Option(help="Pad all batches to one size: an answer does not depend, bitwise, on its batch.")
    ] = False,
    cache: Annotated[
        Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE", help="The folder of exported networks.")
    ] = Path("~/.cache/penstock"),
    app: Annotated[str | None, typer.Option(metavar="REF", help="The application's new place, if it moved.")] = None,
    accept_changed_app: Annotated[bool, typer.Option(help="Accept an application whose sources changed.")] = False,
    frontends: Annotated[
        int | None,
        typer.Option(help="Front-end processes; 0: one in the only engine's process. Default: by the number of cores."),
    ] = None,
    drain_timeout_s: Annotated[float, typer.Option(help="Time for accepted requests after SIGTERM.")] = 10.0,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Admit only clients with a key: lines 'NAME KEY [admin]'.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A site whose pages may send requests, or *; may be repeated."),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    max_connections: Annotated[
        int, typer.Option(help="Connections of one front-end.", rich_help_panel=LIMITS)
    ] = 10_000,
    max_headers: Annotated[int, typer.Option(help="Headers of one request.", rich_help_panel=LIMITS)] = 64,
    idle_timeout_s: Annotated[
        float, typer.Option(help="Close a connection without a request.", rich_help_panel=LIMITS)
    ] = 120.0,
    request_timeout_s: Annotated[
        float, typer.Option(help="Refuse a request whose next bytes do not arrive.", rich_help_panel=LIMITS)
    ] = 20.0,
    watchdog_s: Annotated[
        float, typer.Option(help="Replace a process without a heartbeat.", rich_help_panel=LIMITS)
    ] = 30.0,
    log_format: Annotated[str, typer.Option(help="text or json.", rich_help_panel=LIMITS)] = "text",
    log_requests: Annotated[bool, typer.Option(help="Log a line for each request.", rich_help_panel=LIMITS)] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send traces to this OpenTelemetry collector.", rich_help_panel=LIMITS),
    ] = None,
    trace_share: Annotated[
        float, typer.Option(help="Traced share of the requests whose caller does not decide.", rich_help_panel=LIMITS)
    ] = 0.01,
    verbose: Annotated[bool, typer.Option(help="Log measurements and choices.", rich_help_panel=LIMITS)] = False,
) -> None:
    """Serve bundles over HTTP, batched under a latency budget. Nothing must be tuned."""
    if exact:
        # Set before torch is loaded, here or in a child: matrix products must not depend on memory alignment.
        os.environ["MKL_CBWR"] = "AVX2,STRICT"
    from penstock.serve import settings as s
    from penstock.serve.observe.logs import set_up_logging
    from penstock.serve.server import serve as serve_bundles

    settings = s.Settings(
        models=s.ModelSettings(
            bundles=tuple(bundles or ()), directory=models, app=app, accept_changed_app=accept_changed_app
        ),
        network=s.NetworkSettings(
            host=host, port=port, grpc_port=grpc_port, tls_certificate=tls_certificate, tls_key=tls_key
        ),
        access=s.AccessSettings(api_keys=api_keys, cors=tuple(cors or ())),
        limits=s.LimitSettings(
            max_connections=max_connections,
            max_headers=max_headers,
            idle_timeout_s=idle_timeout_s,
            request_timeout_s=request_timeout_s,
            watchdog_s=watchdog_s,
            drain_timeout_s=drain_timeout_s,
        ),
        batching=s.BatchSettings(latency_ms=latency_ms, max_batch=max_batch),
        execution=s.ExecutionSettings(
            device=device, executor=executor, precision=precision, exact=exact, cache=cache.expanduser()
        ),
        telemetry=s.TelemetrySettings(
            log_format=log_format,
            log_requests=log_requests,
            verbose=verbose,
            otlp_endpoint=otlp_endpoint,
            trace_share=trace_share,
        ),
        frontends=frontends,
    )
    set_up_logging(settings.telemetry, "penstock")
    serve_bundles(settings)
