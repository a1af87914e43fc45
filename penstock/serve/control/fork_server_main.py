"""The process of a fork server: `python -m penstock.serve.control.fork_server_main DESCRIPTOR`.

It imports in a thread at the lowest priority, and forks only while it has no other thread.
"""

import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.serve.control.child_main import end_with, name_process
from penstock.serve.control.child_main import main as child_main
from penstock.serve.control.fork_server import MAX_REQUEST_BYTES, Preload

# Of `nice`, for the thread that imports.
LOWEST_PRIORITY = 19
MAX_DESCRIPTORS = 200
REPARENT_S = 0.0005


def main() -> None:
    """Import and fork until the supervisor is gone; a process that was forked runs its target."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(os.getppid())
    run = _serve(socket.socket(fileno=int(sys.argv[1])))
    if run is not None:
        run()


def _serve(end: socket.socket) -> Callable[[], None] | None:
    """Serve requests; returns what a process that was forked is to run, and None at the end."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(end, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not content:
            return None
        request = json.loads(content)
        if "preload" in request:
            thread = threading.Thread(target=_import, args=(Preload(**request["preload"]),))
            thread.start()
            thread.join()
            end.send(b"imported")
            continue
        pid = _fork() if _threads() == 1 else 0
        if pid is None:
            end.close()
            return lambda: _run(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        end.send(str(pid).encode())


def _import(preload: Preload) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    # An application may raise anything; where it does, the forks report it.
    with suppress(BaseException):
        if preload.module:
            import_module(preload.module)
        if preload.application:
            # Imported here: a fork server of trials serves nothing.
            from penstock.serve.registry.attachments import import_application

            import_module("penstock.serve.control.frontend_process")
            import_application(preload.application, preload.pinned)
    # The modules of a version before are garbage; what lives on is not written to by a collection in the forks.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork() -> int | None:
    """Fork twice; returns the last process, and in that process None."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        last = os.fork()
        if last:
            os.write(writer, str(last).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return None
    os.close(writer)
    os.waitpid(between, 0)
    said = os.read(reader, 32)
    os.close(reader)
    return int(said or 0)


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    parent = request["parent"]
    # Until the process in between has ended, and for ever if the supervisor has.
    while os.getppid() != parent and Path(f"/proc/{parent}").exists():
        time.sleep(REPARENT_S)
    random.seed()
    if request["fork"] == "child":
        os.setpgid(0, 0)
        name, index, settings = json.loads(request["argument"])
        name_process(name)
        channel, *others = descriptors
        child_main(name, index, parent, channel, others, settings)
    else:
        # Imported here: front-ends load no runtime.
        from penstock.runtime.trial import main as trial_main

        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        trial_main(request["argument"])


if __name__ == "__main__":
    main()
