"""One-shot networks served on one GPU, over the same network compiled in a CUDA graph by hand in the same run."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from benchmarks.jpeg_requests import JPEG, bodies_of, jpeg_target
from benchmarks.models import gpu_networks
from penstock import Bundle
from penstock.bench.load.generator import Load, find_goodput, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.bench.server_process import ServerProcess, running_server
from penstock.core.errors import BenchError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.gpu.precision import TOLERANCES

BUDGET_MS = 50
RAW_ROWS = 128
EXAMPLES = 32
QUALITY = 75
SECONDS = 2.0
COMPILE_S = 420.0
PRECISION = "bf16"
# The raw graph runs for as long before it is timed: the clock of a GPU falls under load.
RAW_WARM_UP_S, RAW_RUNS = 2.0, 50
# A pause of the machine fails a trial too.
ATTEMPTS = 2
ALONE_RUNS = 3
# Of a closed loop, for each engine: enough for its largest batches.
CONNECTIONS_AN_ENGINE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Rates of one server.

    Args:
        best: The highest Poisson rate with 99% of all requests within the budget.
        doubled: Right answers a second within the budget at twice that rate.
    """

    best: float
    doubled: float


def over_raw(name: str) -> list[float]:
    """Return the highest Poisson rate with 99% of all requests within the budget over the raw compiled graph's.

    Args:
        name: An application of `benchmarks/models/gpu_networks.py`.

    Raises:
        BenchError: An answer was wrong, or no rate keeps the budget.
    """
    raw = raw_ms(name, RAW_ROWS)
    rate = RAW_ROWS / raw * 1e3
    print(f"{name}: raw compiled graph, {RAW_ROWS} rows: {raw:.3f} ms, {rate:,.0f}/s", flush=True)
    best = measured(name).best
    print(f"{name}: {best:,.0f}/s within {BUDGET_MS} ms, {best / rate:.3f} of the raw graph", flush=True)
    return [best / rate]


def single_ms(name: str = "resnet50") -> list[float]:
    """Return the p50 of one request alone, less the time of the raw compiled graph of one row, in milliseconds."""
    raw = raw_ms(name, 1)
    with served(name) as (_, target, load):
        one = replace(load, rate=None, connections=1, processes=1, seconds=SECONDS)
        alone = [measure(target, one).percentile_ms(50) for _ in range(ALONE_RUNS)]
    print(f"{name}: one request alone {np.round(alone, 3).tolist()} ms; raw graph {raw:.3f} ms", flush=True)
    return [each - raw for each in alone]


def overload_2x(name: str = "resnet50") -> list[float]:
    """Return the goodput at twice the best rate over the best rate."""
    return [measured(name).doubled / measured(name).best]


@cache
def measured(name: str) -> Served:
    """Serve an application once for all figures of a run."""
    with served(name) as (server, target, load):
        best = goodput(server, target, load)
        over = measure(target, replace(load, rate=2 * best, seconds=SECONDS), none_answered=True)
    found = Served(best=best, doubled=over.goodput(BUDGET_MS))
    print(f"{name}: {found}", flush=True)
    return found


def jpeg_over_raw(name: str = "resnet50") -> list[float]:
    """Return the goodput of JPEG bodies of 500 x 375 pixels over that of raw bodies, at the same server."""
    cores = len(os.sched_getaffinity(0))
    with served(name, frontends=max(1, cores * 7 // 8)) as (server, target, load):
        raw = goodput(server, target, load)
        # Small bodies need few senders, and decoding all other cores.
        load = replace(load, processes=max(1, cores // 8))
        best = goodput(server, _jpeg_target(server, name), load)
    print(f"{name}: raw bodies {raw:,.0f}/s; JPEG {best:,.0f}/s, {best / raw:.3f}", flush=True)
    return [best / raw]


def engines(name: str = "encoder_128", gpus: int = 2) -> list[float]:
    """Return the answers a second of several GPUs, an engine each, over those of one, in a closed loop.

    Args:
        name: An application of `benchmarks/models/gpu_networks.py`.
        gpus: Number of GPUs.

    Raises:
        BenchError: An answer was wrong, or there are fewer GPUs.
    """
    if torch.cuda.device_count() < gpus:
        raise BenchError(f"{gpus} GPUs are needed; this machine has {torch.cuda.device_count()}.")
    rates: list[float] = []
    for count in (1, gpus):
        with served(name, device=",".join(f"cuda:{index}" for index in range(count))) as (server, target, load):
            server.start_sampling()
            closed = replace(load, connections=count * CONNECTIONS_AN_ENGINE, seconds=2 * SECONDS)
            rates.append(measure(target, closed).answered_a_second)
            print(f"{name}, {count} GPUs: {rates[-1]:,.0f}/s; {server.usage().description}", flush=True)
    return [rates[1] / rates[0]]


def second_start(name: str = "resnet50") -> list[float]:
    """Return the seconds of a second start to its first answer, less `import torch`."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(name, Path(folder) / name)
        cache = _cache(folder)
        with _server(bundle, cache) as server:
            wait_compiled(server)
            request = _target(server, bundle).requests[0]
        start_s = time.perf_counter()
        with _server(bundle, cache) as server:
            _answer_once(server.url, request)
            took_s = time.perf_counter() - start_s
            # It is the right one.
            measure(_target(server, bundle), Load(rate=None, connections=1, seconds=0.1, warm_up_s=0.0))
        start_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        torch_s = time.perf_counter() - start_s
    print(f"{name}: second start {took_s:.1f} s; import torch {torch_s:.1f} s", flush=True)
    return [took_s - torch_s]


def _answer_once(url: str, request: bytes) -> None:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=COMPILE_S) as client:
        client.sendall(request)
        answer = HTTPResponse(client)
        answer.begin()
        if answer.status != 200:
            raise BenchError(f"the first answer of the server has the status {answer.status}.")
        answer.read()


def goodput(server: ServerProcess, target: Target, load: Load) -> float:
    """Search the highest rate within the budget."""
    closed = measure(target, replace(load, rate=None, connections=1024, seconds=SECONDS))
    print(f"closed loop of 1,024: {closed.answered_a_second:,.0f}/s", flush=True)
    server.start_sampling()
    best, _ = find_goodput(
        target,
        load,
        budget_ms=BUDGET_MS,
        highest=1.2 * closed.answered_a_second,
        attempts=ATTEMPTS,
        say=lambda said: print(f"  {said}", flush=True),
    )
    print(f"  {server.usage().description}", flush=True)
    return best


@contextmanager
def served(
    name: str, frontends: int | None = None, device: str = "cuda"
) -> Generator[tuple[ServerProcess, Target, Load]]:
    """Serve an application until its batches are compiled; yield a load for it too."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(name, Path(folder) / name)
        with _server(bundle, _cache(folder), frontends, device) as server:
            wait_compiled(server)
            cores = len(os.sched_getaffinity(0))
            senders = max(1, cores * 3 // 8)
            load = Load(rate=None, connections=2048, seconds=SECONDS, processes=senders, sender="auto")
            yield server, _target(server, bundle), load


def _cache(folder: str) -> Path:
    """Return the cache that all figures of one run share, where the environment names one."""
    return Path(os.environ.get("PENSTOCK_BENCH_CACHE", str(Path(folder) / "cache")))


def _server(bundle: Path, cache: Path, frontends: int | None = None, device: str = "cuda") -> Any:
    frontends = frontends or max(1, len(os.sched_getaffinity(0)) * 3 // 8)
    options = ("--device", device, "--precision", PRECISION, "--frontends", str(frontends), "--cache", str(cache))
    return running_server(bundle, (*options, "--latency-ms", str(BUDGET_MS)))


def _target(server: ServerProcess, bundle: Path) -> Target:
    return _within_precision(golden_target(server.url, bundle))


def _within_precision(target: Target) -> Target:
    assert target.answers is not None
    allowed = TOLERANCES[PRECISION] * float(abs(target.answers).max())
    return replace(target, tolerance=max(target.tolerance, allowed))


def _jpeg_target(server: ServerProcess, name: str) -> Target:
    application = find_application(f"{gpu_networks.__file__}:{name}").application
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(name, Path(folder) / name)
        target = jpeg_target(server.url, bundle, application, bodies_of(QUALITY), JPEG)
    return _within_precision(target)


def write_bundle(name: str, folder: Path) -> Path:
    """Write a bundle of random weights."""
    found = find_application(f"{gpu_networks.__file__}:{name}")
    torch.manual_seed(0)
    Bundle.write(found, found.model(), gpu_networks.EXAMPLES[name](EXAMPLES), to=folder)
    return folder


def wait_compiled(server: ServerProcess) -> None:
    """Wait until nothing is left to compile.

    Raises:
        BenchError: It takes too long.
    """
    end_s = time.monotonic() + COMPILE_S
    said: list[str] = []
    said_before: list[str] = []
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"{server.url}/v1/stats", timeout=20) as answer:
            engines = json.load(answer)["engines"]
        said = [engine["runs_by"] for engine in engines]
        for number, engine in enumerate(engines):
            if said_before[number : number + 1] != said[number : number + 1]:
                # Of lengths that vary, a list for each length.
                ms = np.round(engine["costs"]["ms"], 2).tolist()
                rows = engine["costs"]["rows"]
                print(f"engine {number}: {engine['runs_by']}; {engine['fallback']} rows {rows} ms {ms}", flush=True)
        if said and all(each.endswith("compiled") for each in said):
            return
        said_before = said
        time.sleep(0.2)
    raise BenchError(f"the batches were not compiled within {COMPILE_S:g} s: {said}.")


def raw_ms(name: str, rows: int) -> float:
    """Return the time of the network in bf16, channels last, compiled, in a CUDA graph, in milliseconds."""
    command = [sys.executable, "-m", "benchmarks.acceptance.server.gpu_serving", name, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Print the time of the raw network, in a process that ends with its memory."""
    name, rows = arguments[0], int(arguments[1])
    torch.manual_seed(0)
    network: Any = find_application(f"{gpu_networks.__file__}:{name}").model().eval().requires_grad_(False)
    network = network.to("cuda", torch.bfloat16)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    given: Any = gpu_networks.EXAMPLES[name](rows)
    # Of several tensors, the first; `raw` makes the others.
    given = torch.from_numpy(next(iter(given.values())) if isinstance(given, dict) else given).to("cuda")
    torch.backends.cudnn.benchmark = True
    with torch.inference_mode():
        run = torch.compile(network.raw, dynamic=False)
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(3):
                run(given)
        aside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(given)
        times_ms: list[float] = []
        end_s = time.monotonic() + RAW_WARM_UP_S
        while time.monotonic() < end_s:
            graph.replay()
            torch.cuda.synchronize()
        for _ in range(RAW_RUNS):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times_ms.append(before.elapsed_time(after))
    print(sorted(times_ms)[len(times_ms) // 2])


if __name__ == "__main__":
    main(sys.argv[1:])
