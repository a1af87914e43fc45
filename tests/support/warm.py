"""One process that imports torch once and is forked for each process that the tests start.

An import of torch and of what its optimizers and its exporter need takes 2 to 6 s of a core, and the tests start
hundreds of processes. While the tests run, `sys.executable` is tests/support/warm_client.py, in the forked processes
too: modules that are started as `python -m` begin with their imports done. `pytest --cold` starts every process anew.

    python -m tests.support.warm SOCKET PYTHON EAGER
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.warm_client import LENGTH_BYTES, PARENT_VARIABLE, SOCKET_VARIABLE

# What the commands of Penstock import sooner or later; not onnxruntime, which starts a thread that a fork would lose.
IMPORTS = (
    "torch._dynamo",
    "torch.distributed",
    "torch.onnx",
    "torch.onnx._internal.exporter._core",
    "torch.onnx._internal.exporter._capture_strategies",
    "torch.onnx._internal.exporter._torchlib.ops",
    "torch._functorch.aot_autograd",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "onnxscript.function_libs.torch_lib.ops",
    "onnxscript.optimizer",
    "onnxscript.rewriter.onnx_fusions",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "penstock.cli",
    "penstock.train.trainer",
    "penstock.runtime.load",
)
CLIENT = Path(__file__).with_name("warm_client.py")
PYTHON_VARIABLE = "PENSTOCK_TESTS_PYTHON"
_PR_SET_PDEATHSIG = 1


@contextmanager
def warm_processes(*, eager: bool) -> Generator[None]:
    """Make `sys.executable` fork until the end of the block.

    Args:
        eager: Import at once, and not at the first request: many selections of tests make none.
    """
    cold = sys.executable
    with tempfile.TemporaryDirectory(prefix="penstock-warm-") as folder:
        python, place = Path(folder) / "python", Path(folder) / "socket"
        python.write_text(f"#!{cold} -IS\n{CLIENT.read_text()}")
        python.chmod(0o755)
        command = [cold, "-m", "tests.support.warm", str(place), str(python), str(int(eager))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=CLIENT.parents[2]) as server:
            assert server.stdout is not None
            server.stdout.readline()
            os.environ |= {SOCKET_VARIABLE: str(place), PYTHON_VARIABLE: str(python)}
            sys.executable = str(python)
            try:
                yield
            finally:
                sys.executable = cold
                del os.environ[SOCKET_VARIABLE], os.environ[PYTHON_VARIABLE]
                server.kill()


def main(place: str, python: str, eager: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(128)
        print("ready", flush=True)
        if not int(eager):
            select.select([listener], [], [])
        gc.disable()
        for module in IMPORTS:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()
        gc.enable()
        # Watchers end after the process that they watch, and nothing waits for them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, streams = _received(connection)
    process = os.fork()
    if process:
        _watch(connection, process, streams)
    connection.close()
    sys.executable = python
    _become(json.loads(content), streams)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    length, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    content = b""
    while len(content) < int.from_bytes(length):
        part = connection.recv(1 << 20)
        if not part:
            # Its client was killed before it had sent everything.
            os._exit(1)
        content += part
    return content, streams


def _watch(connection: socket.socket, process: int, streams: list[int]) -> None:
    """Send the exit status of a process; kill the process if its client is gone."""
    for descriptor in (0, 1, 2, *streams):
        os.close(descriptor)
    ended = os.pidfd_open(process)
    # A client that was killed before takes nothing; its end is seen below.
    with suppress(OSError):
        connection.sendall(process.to_bytes(LENGTH_BYTES))
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    try:
        connection.sendall(status.to_bytes(LENGTH_BYTES))
    finally:
        os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Run the module of a request as `python -m` would, in its folder, environment and streams."""
    for to, descriptor in enumerate(streams):
        os.dup2(descriptor, to)
        os.close(descriptor)
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT_VARIABLE in os.environ:
        os.environ[PARENT_VARIABLE] = str(os.getppid())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = [request["folder"], *paths]
    sys.argv = [request["module"], *request["arguments"]]
    # It may have been imported by another of `IMPORTS`.
    sys.modules.pop(request["module"], None)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
