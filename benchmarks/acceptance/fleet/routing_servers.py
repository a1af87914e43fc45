"""Servers of one bundle on ports that stay, so that each can be restarted and killed behind a proxy."""

import os
import signal
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self, final

import numpy as np

from benchmarks.acceptance.fleet.routing_proxies import Backend
from penstock.bench.server_process import ServerProcess, ended_by_sigterm, model_stats, running_server
from penstock.core.errors import BenchError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle

STOP_S = 60.0
# Time in which a proxy sends requests to a server that is ready, and between two looks at it.
SEEN_S, POLL_S = 60.0, 0.05
# Seconds of a batch of any size.
PACE = "FLEET_PACE_S"
NUMBERS = 64

APPLICATION = f"""
import os
import time

from penstock import Application, TensorSpec


def network():
    import torch

    pace_s = float(os.environ.get("{PACE}", "0"))

    class Paced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            time.sleep(pace_s)
            return x * self.factor

    return Paced()


app = Application(
    name="paced",
    input=TensorSpec(dtype="float32", shape=({NUMBERS},), meaning="numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=({NUMBERS},), meaning="their doubles", name="doubles"),
    model=network,
)
"""


def write_paced(folder: Path) -> Path:
    """Write an application that doubles numbers at a pace, and its bundle, into a folder."""
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    numbers = np.arange(4 * NUMBERS, dtype=np.float32).reshape(4, NUMBERS)
    Bundle.write(found, found.model(), numbers, to=folder / "bundle")
    return folder / "bundle"


def free_ports(count: int) -> list[int]:
    """Find free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@final
class RoutedServers:
    """Some servers of a bundle; `routed_servers` makes them.

    Args:
        bundle: The bundle.
        options: Options of each server.
        environments: Variables of each server, one for each.
        grpc: Whether they serve gRPC too.

    Attributes:
        backends: Their ports.
        name: The name of the model.
    """

    name = "paced"

    def __init__(
        self, bundle: Path, options: Sequence[str], environments: Sequence[Mapping[str, str]], *, grpc: bool = False
    ) -> None:
        self._bundle, self._options, self._environments = bundle, options, environments
        ports = free_ports(3 * len(environments))
        self.backends = [
            Backend(port=port, agent_port=agent, grpc_port=rpc if grpc else 0)
            for port, agent, rpc in zip(ports[::3], ports[1::3], ports[2::3], strict=True)
        ]
        self._running: dict[int, tuple[AbstractContextManager[ServerProcess], ServerProcess]] = {}

    def start(self, index: int) -> None:
        """Start one; return when it is ready."""
        backend = self.backends[index]
        ports = ["--port", str(backend.port), "--agent-port", str(backend.agent_port)]
        if backend.grpc_port:
            ports += ["--grpc-port", str(backend.grpc_port)]
        context = running_server(self._bundle, [*ports, *self._options], environment=self._environments[index])
        self._running[index] = context, context.__enter__()

    def start_all(self) -> Self:
        """Start all of them at once."""
        with ThreadPoolExecutor(len(self.backends)) as pool:
            list(pool.map(self.start, range(len(self.backends))))
        return self

    def process(self, index: int) -> ServerProcess:
        """Return a running server."""
        return self._running[index][1]

    def restart(self, index: int) -> None:
        """End one with SIGTERM, wait until it has left and drained, and start it again."""
        self.process(index).process.terminate()
        status = self.process(index).process.wait(STOP_S)
        assert status == 0, status
        self._end(index)
        self.start(index)

    def kill(self, index: int) -> None:
        """End one with SIGKILL."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process(index).process.pid, signal.SIGKILL)
        self._end(index)

    def await_requests(self, index: int) -> None:
        """Wait until requests come to one that was started: the proxy has seen it.

        Raises:
            BenchError: None came.
        """
        end_s = time.monotonic() + SEEN_S
        while not sum(model_stats(self.process(index).url, self.name)["inference_stats"]["success"].values()):
            if time.monotonic() > end_s:
                raise BenchError(f"no request came to a server within {SEEN_S:g} s.")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End all of them at once."""
        for index in list(self._running):
            self.kill(index)

    def _end(self, index: int) -> None:
        context, _ = self._running.pop(index)
        context.__exit__(None, None, None)


@contextmanager
def routed_servers(
    bundle: Path, options: Sequence[str] = (), paces_s: Sequence[float] = (0.0,) * 4, *, grpc: bool = False
) -> Generator[RoutedServers]:
    """Run servers of a bundle until the block ends, also by SIGTERM.

    Args:
        bundle: The bundle of `write_paced`.
        options: More options of each.
        paces_s: The time of a batch of each.
        grpc: Whether they serve gRPC too.
    """
    environments = [{PACE: str(pace_s), "OMP_NUM_THREADS": "1"} for pace_s in paces_s]
    servers = RoutedServers(bundle, ["--executor", "torch", *options], environments, grpc=grpc)
    with ended_by_sigterm():
        try:
            yield servers.start_all()
        finally:
            servers.close()
