"""Start and stop of a server, in one process or under a supervisor."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

from penstock.serve.compiled import interpreted_note
from penstock.serve.http.server_sockets import url_of
from penstock.serve.settings import NetworkSettings

log = logging.getLogger(__name__)


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` at each SIGTERM, SIGINT and SIGHUP, of a closed terminal; not at a SIGHUP that nohup ignores."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, stop)


async def wait_to_leave(seconds: float, hurry: asyncio.Event) -> None:
    """Wait until load balancers have seen that the server is not ready, or until `hurry` is set."""
    if seconds:
        log.info("leaving: not ready for %g s, and then draining", seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), seconds)


def announce(
    models: Iterable[str], fallbacks: Iterable[str], listener: socket.socket, network: NetworkSettings
) -> None:
    """Print which models are served, where, and which of them run slower than they could."""
    names = ", ".join(dict.fromkeys(models)) or "no model"
    lines = [f"Serving {names} at {url_of(listener, network.tls_certificate is not None)}"]
    if network.grpc_port is not None:
        lines.append(f"Serving {names} by gRPC on port {network.grpc_port}")
    if network.agent_port is not None:
        lines.append(f"Answering agent checks on port {network.agent_port}")
    lines += [f"Note: {note}" for note in filter(None, dict.fromkeys([*fallbacks, interpreted_note()]))]
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        # The server does not need its output: the disk is full, or who read it is gone.
        log.warning("what is served cannot be printed (%s): %s", error.strerror, "; ".join(lines))
        # Or Python would try again when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def end_at_once() -> NoReturn:
    """End this process with status 0, although a thread of it still loads a network."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
