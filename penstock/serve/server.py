"""`serve`: one process, or a supervisor with its front-ends and its engines."""

import asyncio
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from penstock.core.bundles.bundle import read_manifest
from penstock.serve.control.descriptors import raise_limit, within_limit
from penstock.serve.control.front_end import access_of, check_telemetry, sealer_of
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.http.server_sockets import BACKLOG, listeners, with_free_ports
from penstock.serve.http.tls_files import tls_of
from penstock.serve.settings import Settings
from penstock.serve.table.client_counts import write_counts


def serve(settings: Settings) -> None:
    """Serve bundles until SIGTERM or SIGINT.

    Raises:
        PenstockError: A bundle, the API keys or the TLS files cannot be used, a network is slower than the budget, or
            the port is taken.
    """
    # Each front-end reads these files itself; a mistake in them is reported here, once and in one sentence.
    access_of(settings.access)
    sealer_of(settings.access)
    tls_of(settings.network)
    check_telemetry(settings.telemetry)
    for bundle in settings.models.bundles:
        # The export of another one before it may take minutes.
        read_manifest(bundle)
    settings = within_limit(settings, raise_limit())
    with closing(ReservedPorts()) as reserved:
        _serve(settings, reserved)


def _serve(settings: Settings, reserved: ReservedPorts) -> None:
    network, processes = settings.network, settings.frontend_processes
    sockets = listeners(network.host, network.port, processes or 1, reserved)
    # Processes that are started later must not count the cores again.
    settings = replace(settings, network=with_free_ports(network, reserved), frontends=processes)
    for listener in sockets:
        # Before anything is loaded: connections wait in the backlog until they are accepted.
        listener.listen(BACKLOG)
    with (
        _regions(settings) as settings,
        _client_counts(settings) as settings,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if processes == 0:
            # Imported here: it loads torch, which a supervisor does not need.
            from penstock.serve.control.single_process import serve_single

            runner.run(serve_single(settings, sockets[0], reserved))
        else:
            from penstock.serve.control.supervisor import supervise

            runner.run(supervise(settings, sockets, reserved))


@contextmanager
def _regions(settings: Settings) -> Generator[Settings]:
    """Make the folder of the registered regions of shared memory, which all front-ends use."""
    if not settings.access.shared_memory:
        yield settings
        return
    with TemporaryDirectory(prefix="penstock-regions-") as folder:
        yield replace(settings, access=replace(settings.access, regions=Path(folder)))


@contextmanager
def _client_counts(settings: Settings) -> Generator[Settings]:
    """Make the file of the counts of live streams by client, which all front-ends map."""
    if settings.frontend_processes < 2 or not settings.has_stream_quotas:
        yield settings
        return
    with TemporaryDirectory(prefix="penstock-clients-") as folder:
        file = Path(folder) / "counts"
        write_counts(file, settings.frontend_processes)
        yield replace(settings, access=replace(settings.access, client_counts=file))
