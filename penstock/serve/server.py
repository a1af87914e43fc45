"""`serve`: one process, or a supervisor with its front-ends and its engine."""

import asyncio
import resource

import uvloop

from penstock.serve.front import access_of, check_telemetry
from penstock.serve.http_server import tls_of
from penstock.serve.settings import Settings


def serve(settings: Settings) -> None:
    """Serve bundles until SIGTERM or SIGINT.

    Raises:
        PenstockError: A bundle, the API keys or the TLS files cannot be used, a network is slower than the budget, or
            the port is taken.
    """
    # Each front-end reads them for itself; a mistake in them is said here, once and in one sentence.
    access_of(settings)
    tls_of(settings)
    check_telemetry(settings)
    _allow_many_descriptors()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if settings.frontend_processes == 0:
            # The only way that loads torch in this process.
            from penstock.serve.single import serve_single

            serve_single(settings, runner)
        else:
            from penstock.serve.supervisor import supervise

            supervise(settings, runner)


def _allow_many_descriptors() -> None:
    # A connection takes one each, and the usual soft limit is 1,024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
