"""Entry point of the supervisor's children, engines and front-ends: `python -m penstock.serve.control.child_main`."""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys

import uvloop

from penstock.core.errors import PenstockError
from penstock.serve.channel import packets_of
from penstock.serve.control.freed_memory import keep_freed_memory
from penstock.serve.messages import StartFailed
from penstock.serve.observe.logs import set_up_logging
from penstock.serve.settings import Settings

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the engine or front-end that the command line names."""
    name, index, parent, channel, descriptors = json.loads(sys.argv[1])
    # The kernel kills this process when the supervisor ends, however it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A signal to the whole group or control group must still drain: the supervisor decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = Settings.from_json(sys.argv[2])
    set_up_logging(settings.telemetry, name)
    end = socket.socket(fileno=channel)
    run = _run_engine if name.startswith("engine") else _run_frontend
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run(settings, end, index, descriptors))
        except PenstockError as error:
            for packet in packets_of(StartFailed(error=str(error))):
                end.send(packet)
            sys.exit(2)


async def _run_engine(settings: Settings, end: socket.socket, index: int, descriptors: list[int]) -> None:
    # Imported here: only engines load torch.
    from penstock.serve.engine.engine_process import EngineProcess

    own, *frontends = descriptors
    await EngineProcess(settings, end, index, own, frontends).run()


async def _run_frontend(settings: Settings, end: socket.socket, index: int, descriptors: list[int]) -> None:
    from penstock.serve.control.frontend_process import FrontendProcess

    keep_freed_memory()
    *engines, own, listener = descriptors
    await FrontendProcess(settings, end, index, own, engines, socket.socket(fileno=listener)).run()


if __name__ == "__main__":
    main()
