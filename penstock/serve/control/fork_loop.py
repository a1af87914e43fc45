"""The loop of a fork server's process: it imports and forks on request of the supervisor.

It imports in a thread at a low priority, and forks only while it has no other thread.
"""

import gc
import json
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from penstock.core.machine.priority import in_low_thread
from penstock.core.machine.process_stat import is_running
from penstock.core.machine.start_pace import StartPace
from penstock.serve.control.child_main import main as child_main
from penstock.serve.control.child_main import name_process
from penstock.serve.control.fork_generation import ALL, BECOMES, HAS_THREADS, IMPORTED, MAX_REQUEST_BYTES, Preload
from penstock.serve.control.parent_process import end_with

MAX_DESCRIPTORS = 200
REPARENT_S = 0.0005

# The next function that a process runs; None at the end.
Step = Callable[[], Any] | None


def run(descriptor: int) -> None:
    """Import and fork until the supervisor is gone; a process that was forked runs its target.

    Args:
        descriptor: This end of the socket pair.
    """
    step: Step = partial(_serve, socket.socket(fileno=descriptor))
    # A loop and no nested calls: each fork server may be forked from the one before.
    while step is not None:
        step = step()


def _serve(end: socket.socket) -> Step:
    """Serve requests; return the next step in a process that was forked or becomes another, and None at the end."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(end, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not content:
            return None
        request = json.loads(content)
        if "preload" in request:
            in_low_thread(partial(_import, Preload(**request["preload"]), collects=request["collects"]))
            end.send(IMPORTED if _threads() == 1 else HAS_THREADS)
            continue
        if request["order"] == "become":
            end.send(BECOMES)
            pid = None
        else:
            pid = _fork() if _threads() == 1 else 0
        if pid is None:
            end.close()
            return partial(_run, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        end.send(str(pid).encode())


def _import(preload: Preload, *, collects: str) -> None:
    # An application may raise anything; where it does, the forks report it.
    with suppress(BaseException):
        if preload.module:
            import_module(preload.module)
        if preload.application:
            # Imported here: a fork server of trials serves nothing.
            from penstock.serve.registry.attachments import import_application

            import_module("penstock.serve.control.frontend_process").compute_ahead()
            import_application(preload.application, preload.pinned)
    if not collects:
        return
    if collects == ALL:
        # Modules of earlier versions are garbage, too. In a forked process, collecting them copies all shared memory.
        gc.unfreeze()
    gc.collect()
    # A collection in a fork then writes to no object from here, which would copy its memory.
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


def _run(request: dict[str, Any], descriptors: list[int]) -> Step:
    parent = request["parent"]
    # Until the process in between has ended, and for ever if the supervisor has.
    while os.getppid() != parent and is_running(parent):
        time.sleep(REPARENT_S)
    random.seed()
    if request["target"] == "fork server":
        os.setpgid(0, 0)
        return partial(_serve, socket.socket(fileno=descriptors[0])) if end_with(parent) else None
    if request["target"] == "child":
        os.setpgid(0, 0)
        name, index, settings, gives_way = json.loads(request["argument"])
        pace = StartPace() if gives_way else None
        name_process(name)
        channel, *others = descriptors
        child_main(name, index, parent, channel, others, settings, pace)
    else:
        # Imported here: front-ends load no runtime.
        from penstock.runtime.trial import main as trial_main

        # No session of its own: the kernel may schedule sessions as groups, each with the same share of a core.
        os.setpgid(0, 0)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        trial_main(request["argument"])
    return None
