"""Entry point of the supervisor's children, engines and front-ends: `python -m penstock.serve.control.child_main`."""

import asyncio
import ctypes
import json
import signal
import socket
import sys
from functools import partial

import uvloop

from penstock.core.errors import PenstockError
from penstock.core.machine.start_pace import StartPace
from penstock.serve.channel import packets_of
from penstock.serve.control.freed_memory import keep_freed_memory
from penstock.serve.control.parent_process import end_with
from penstock.serve.messages import StartFailed
from penstock.serve.observe.logs import set_up_logging
from penstock.serve.settings import Settings

_PR_SET_NAME = 15


def main(
    name: str,
    index: int,
    parent: int,
    channel: int,
    descriptors: list[int],
    settings_json: str,
    pace: StartPace | None = None,
) -> None:
    """Run an engine or front-end.

    Args:
        name: `engine`, of several `engine N on DEVICE`, or `front-end N`.
        index: Index among the engines or the front-ends.
        parent: The supervisor's process.
        channel: Descriptor of the channel to it.
        descriptors: Those of the eventfds, and for a front-end of the listening sockets of all front-ends.
        settings_json: Settings of the server.
        pace: Pauses of a front-end's start; None if nothing else serves meanwhile.
    """
    if not end_with(parent):
        return
    # A signal to the whole group or control group must still drain: the supervisor decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = Settings.from_json(settings_json)
    set_up_logging(settings.telemetry, name)
    end = socket.socket(fileno=channel)
    run = _run_engine if name.startswith("engine") else partial(_run_frontend, pace)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run(settings, end, index, descriptors))
        except PenstockError as error:
            for packet in packets_of(StartFailed(error=str(error))):
                end.send(packet)
            sys.exit(2)


def name_process(name: str) -> None:
    """Name this process in process lists; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


async def _run_engine(settings: Settings, end: socket.socket, index: int, descriptors: list[int]) -> None:
    # Imported here: only engines load torch.
    from penstock.serve.engine.engine_process import EngineProcess

    own, *frontends = descriptors
    await EngineProcess(settings, end, index, own, frontends).run()


async def _run_frontend(
    pace: StartPace | None, settings: Settings, end: socket.socket, index: int, descriptors: list[int]
) -> None:
    from penstock.serve.control.frontend_process import FrontendProcess

    keep_freed_memory()
    count = settings.frontend_processes
    *engines, own = descriptors[:-count]
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors[-count:]]
    if pace is not None:
        await asyncio.sleep(pace.pause_s())
    await FrontendProcess(settings, end, index, own, engines, listeners, pace).run()


if __name__ == "__main__":
    own_name, own_index, supervisor, to_supervisor, given = json.loads(sys.argv[1])
    main(own_name, own_index, supervisor, to_supervisor, given, sys.argv[2])
