"""`penstock serve`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import ServeError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder, RUN/bundle.")],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    latency_ms: Annotated[float, typer.Option(help="The latency budget of a request that names none.")] = 50.0,
    max_batch: Annotated[int | None, typer.Option(help="Hold batches to this many rows; the budget decides.")] = None,
    app: Annotated[str | None, typer.Option(metavar="REF", help="Where the application is now, if it moved.")] = None,
    accept_changed_app: Annotated[bool, typer.Option(help="Take an application whose sources changed.")] = False,
    frontends: Annotated[int, typer.Option(help="Front-end processes; 0 shares the engine's own.")] = 0,
    drain_s: Annotated[float, typer.Option(help="How long accepted requests may take after SIGTERM.")] = 10.0,
    grpc_port: Annotated[
        int | None, typer.Option(help="The port of gRPC; 0 takes a free one. Without it: none.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Log what was measured and chosen.")] = False,
) -> None:
    """Serve a bundle over HTTP, batched under a latency budget. Nothing must be tuned."""
    import logging

    if frontends != 0:
        raise ServeError(f"--frontends is {frontends}; only 0 is there now: the front-end shares the engine's process.")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from penstock.serve.server import Settings
    from penstock.serve.server import serve as serve_bundle

    serve_bundle(
        Settings(
            bundle=bundle,
            host=host,
            port=port,
            latency_ms=latency_ms,
            max_batch=max_batch,
            app=app,
            accept_changed_app=accept_changed_app,
            drain_s=drain_s,
            grpc_port=grpc_port,
        )
    )
