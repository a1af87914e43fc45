"""What Triton's system shared memory saves a local client: requests/s and CPU beside bytes over a socket.

python -m benchmarks.shared_memory [--bytes 150528 --bytes 2097152] [--in-flight 1 --in-flight 16] [--repeat 5]

The client is an unmodified tritonclient, which fills its region before each request. The network does next to nothing.
The variants alternate.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gevent
import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.core.machine.process_stat import cpu_seconds
from penstock.core.spec import Array

NAME = f"penstock-{os.getpid()}"
VARIANTS = ("socket", "shared")
REGION = "region"
APPLICATION = """
from penstock import Application, TensorSpec


def network():
    from torch import nn

    class First(nn.Module):
        def forward(self, x):
            return x[:, :8].float()

    return First()


app = Application(
    name="first",
    input=TensorSpec(dtype="uint8", shape=({size},), meaning="bytes", name="x"),
    output=TensorSpec(dtype="float32", shape=(8,), meaning="the first of them", name="y"),
    model=":network",
)
"""


def measure(size: int, in_flight: int, repeat: int, table: Table) -> None:
    """Add the medians of HTTP and gRPC at one size to the table."""
    with warnings.catch_warnings():
        # gevent, which the client brings, warns at import about its own use of deprecated names.
        warnings.simplefilter("ignore")
        import tritonclient.grpc as over_grpc
        import tritonclient.http as over_http
    from tritonclient.utils import shared_memory

    chunks = np.random.default_rng(0).integers(0, 255, (in_flight, 1, size), np.uint8)
    handle: Any = shared_memory.create_shared_memory_region(REGION, NAME, size * in_flight)
    seconds: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    with TemporaryDirectory() as folder:
        server, clients = start_server(Path(folder), size, in_flight, over_http, over_grpc)
        try:
            clients["HTTP"][1].register_system_shared_memory(REGION, NAME, size * in_flight)
            for turn in range(repeat + 1):
                for protocol, (module, client) in clients.items():
                    for variant in VARIANTS:
                        burst = make_burst(module, client, variant, handle, chunks, shared_memory)
                        bursts = max(1, int((1e8 / size + 100) / in_flight))
                        before, cpu, start = cpu_seconds(server.pid), time.process_time(), time.perf_counter()
                        for _ in range(bursts):
                            burst()
                        requests, taken = bursts * in_flight, time.perf_counter() - start
                        client_s, server_s = time.process_time() - cpu, cpu_seconds(server.pid) - before
                        if turn:
                            figures = requests / taken, server_s / requests * 1e6, client_s / requests * 1e6
                            seconds.setdefault((protocol, variant), []).append(figures)
        finally:
            server.terminate()
            server.wait(20)
            shared_memory.destroy_shared_memory_region(handle)
    for (protocol, variant), found in seconds.items():
        rate, server_us, client_us = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = [ours[0] / peer[0] for ours, peer in zip(found, seconds[protocol, "socket"], strict=True)]
        row = f"{size:,}", f"{in_flight}", protocol, variant, f"{rate:,.0f}", f"{statistics.median(ratios):.2f}"
        table.add_row(*row, f"{server_us:,.0f}", f"{client_us:,.0f}")


def start_server(
    folder: Path, size: int, in_flight: int, over_http: Any, over_grpc: Any
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start the server; return its process and the module and client of each protocol."""
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    (folder / "app.py").write_text(APPLICATION.format(size=size))
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.zeros((1, size), np.uint8), to=folder / "bundle")
    command = [sys.executable, "-m", "penstock", "serve", str(folder / "bundle"), "--port", "0"]
    command += ["--grpc-port", "0", "--frontends", "0", "--max-batch", "16", "--latency-ms", "5000"]
    command += ["--shared-memory", "64"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    lines = [server.stdout.readline(), server.stdout.readline()]
    http, grpc = (
        int("".join(filter(str.isdigit, line.rpartition(mark)[2])))
        for line, mark in zip(lines, (":", "port"), strict=True)
    )
    http_client = over_http.InferenceServerClient(f"127.0.0.1:{http}", concurrency=in_flight)
    while not http_client.is_server_ready():
        time.sleep(0.1)
    grpc_client = over_grpc.InferenceServerClient(f"127.0.0.1:{grpc}")
    clients = {"HTTP": (over_http, http_client), "gRPC": (over_grpc, grpc_client)}
    return server, clients


def make_burst(
    module: Any, client: Any, variant: str, handle: Any, chunks: Array, shared_memory: Any
) -> Callable[[], None]:
    """Return a function that sends every chunk at once and checks the answers."""
    size = chunks[0].nbytes
    wanted = [module.InferRequestedOutput("y")]

    def tensor(at: int) -> Any:
        given = module.InferInput("x", [1, size], "UINT8")
        if variant == "socket":
            given.set_data_from_numpy(chunks[at])
        else:
            shared_memory.set_shared_memory_region(handle, [chunks[at]], at * size)
            given.set_shared_memory(REGION, size, at * size)
        return given

    def burst() -> None:
        if len(chunks) == 1:
            found = [client.infer("first", [tensor(0)], outputs=wanted)]
        elif module.__name__.endswith("http"):
            # Its async_infer sleeps 10 ms a call.
            asked = [gevent.spawn(client.infer, "first", [tensor(at)], outputs=wanted) for at in range(len(chunks))]
            found = [each.get() for each in asked]
        else:
            found = at_once(client, [[tensor(at)] for at in range(len(chunks))], wanted)
        for chunk, result in zip(chunks, found, strict=True):
            assert (result.as_numpy("y")[0] == chunk[0, :8]).all()

    return burst


def at_once(client: Any, inputs: list[list[Any]], wanted: list[Any]) -> list[Any]:
    """Send requests at once over gRPC; return their results in order."""
    from concurrent.futures import Future

    futures: list[Future[Any]] = [Future() for _ in inputs]

    def resolve(future: Future[Any], result: Any, error: Any) -> None:
        future.set_exception(error) if error is not None else future.set_result(result)

    for future, given in zip(futures, inputs, strict=True):
        client.async_infer(
            "first", given, lambda result, error, future=future: resolve(future, result, error), outputs=wanted
        )
    return [future.result(30) for future in futures]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, action="append")
    parser.add_argument("--in-flight", type=int, action="append")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    table = Table("bytes", "in flight", "protocol", "input", "requests/s", "ratio", "server us", "client us")
    for size in options.bytes or [150_528, 2_097_152]:
        for in_flight in options.in_flight or [1, 16]:
            measure(size, in_flight, options.repeat, table)
    Console().print(table)


if __name__ == "__main__":
    main()
