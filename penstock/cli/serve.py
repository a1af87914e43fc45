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
    bundles: Annotated[list[Path] | None, typer.Argument(metavar="BUNDLE...", help="Folders, RUN/bundle.")] = None,
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A model directory: serve all, load and unload by request."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Serve the Open Inference Protocol by gRPC on this port too; 0 takes a free one.")
    ] = None,
    latency_ms: Annotated[float, typer.Option(help="The latency budget of a request that names none.")] = 50.0,
    max_batch: Annotated[int | None, typer.Option(help="Hold batches to this many rows; the budget decides.")] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="What runs networks on a CPU: onnx or torch; auto takes onnx where it can, for streams if faster."
        ),
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
        bool, typer.Option(help="Fill all batches to one size: answers are bitwise the same in any company.")
    ] = False,
    cache: Annotated[
        Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE", help="Where exported networks are kept.")
    ] = Path("~/.cache/penstock"),
    app: Annotated[str | None, typer.Option(metavar="REF", help="Where the application is now, if it moved.")] = None,
    accept_changed_app: Annotated[bool, typer.Option(help="Take an application whose sources changed.")] = False,
    frontends: Annotated[
        int | None, typer.Option(help="Front-end processes; 0 shares the only engine's. By the cores, if not given.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="How long accepted requests may take after SIGTERM.")] = 10.0,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let only clients with a key ask: lines 'NAME KEY [admin]'.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose pages may ask, or *; may be repeated.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    max_connections: Annotated[
        int, typer.Option(help="Connections of one front-end.", rich_help_panel=LIMITS)
    ] = 10_000,
    max_headers: Annotated[int, typer.Option(help="Headers of one request.", rich_help_panel=LIMITS)] = 64,
    idle_s: Annotated[float, typer.Option(help="Close a silent connection.", rich_help_panel=LIMITS)] = 120.0,
    begun_s: Annotated[
        float, typer.Option(help="Refuse a request that does not come on.", rich_help_panel=LIMITS)
    ] = 20.0,
    hangs_s: Annotated[
        float, typer.Option(help="Replace a process that does not move.", rich_help_panel=LIMITS)
    ] = 30.0,
    log_format: Annotated[str, typer.Option(help="text or json.", rich_help_panel=LIMITS)] = "text",
    log_requests: Annotated[bool, typer.Option(help="Log a line for each request.", rich_help_panel=LIMITS)] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send traces to this OpenTelemetry collector.", rich_help_panel=LIMITS),
    ] = None,
    trace_share: Annotated[
        float, typer.Option(help="Of the requests whose caller does not decide.", rich_help_panel=LIMITS)
    ] = 0.01,
    verbose: Annotated[bool, typer.Option(help="Log what was measured and chosen.", rich_help_panel=LIMITS)] = False,
) -> None:
    """Serve bundles over HTTP, batched under a latency budget. Nothing must be tuned."""
    if exact:
        # Before torch is loaded, here or in a child: products must not depend on where in memory a row lies.
        os.environ["MKL_CBWR"] = "AVX2,STRICT"
    from penstock.serve.logs import set_up_logging
    from penstock.serve.server import serve as serve_bundles
    from penstock.serve.settings import Settings

    settings = Settings(
        bundles=tuple(bundles or ()),
        models=models,
        host=host,
        port=port,
        grpc_port=grpc_port,
        latency_ms=latency_ms,
        max_batch=max_batch,
        executor=executor,
        device=device,
        precision=precision,
        exact=exact,
        cache=cache.expanduser(),
        app=app,
        accept_changed_app=accept_changed_app,
        frontends=frontends,
        drain_s=drain_s,
        api_keys=api_keys,
        cors=tuple(cors or ()),
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        max_connections=max_connections,
        max_headers=max_headers,
        idle_s=idle_s,
        begun_s=begun_s,
        hangs_s=hangs_s,
        log_format=log_format,
        log_requests=log_requests,
        otlp_endpoint=otlp_endpoint,
        trace_share=trace_share,
        verbose=verbose,
    )
    set_up_logging(settings, "penstock")
    serve_bundles(settings)
