"""Goodput of texts of many lengths, beside the same server with every text padded to 512 tokens, and beside Mosec.

`python -m benchmarks.acceptance server --only net.text_vs_padded` (or `net.text_vs_peer`) measures on one core.
With `--only net.text_vs_padded_gpu` it measures a network of the size of BERT-base in bf16 on a GPU, and
`python -m benchmarks.acceptance.server.lengths --device cuda:0 [--precision fp16]` in another precision.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.acceptance.server.gpu_serving import wait_compiled
from benchmarks.models import text
from benchmarks.peers.peer_process import make_environment, running
from benchmarks.peers.servers import ComparedServer, Tuning
from penstock import Bundle
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target, request_bytes
from penstock.bench.load.sender import Target
from penstock.bench.server_process import running_server
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.gpu.precision import TOLERANCES

BUDGET_MS = 50
# No deadline counts for padded texts: one of them may take longer than the budget.
PADDED_MS = 5000
EXAMPLES, BASE_EXAMPLES = 64, 32
SECONDS = 6.0
# Offered load over the rate of the closed loop; the best goodput counts. The closed loop itself does not: it sends
# another text for each that is rejected, so that the short ones that are answered are many more than in a load.
LOADS = (0.6, 0.9, 1.3)
# Mosec's batch sizes; it has one for all lengths. The two with the highest rates are measured within the budget.
PEER_BATCHES = (1, 2, 4, 8)
PEER_BEST = 2
PEER_CLOSED_S = 4.0
RAW = "application/octet-stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores of a server and of its load generator.

    Args:
        server: Cores of the server.
        sender: Cores of the load generator.
        options: Options of `penstock serve`.
        closed: Connections of the closed loop.
        connections: Connections of the loads.
        processes: Processes that send.
        precision: Precision of the server.
        compiles: Whether the server compiles its batches, which the loads wait for.
    """

    server: frozenset[int]
    sender: frozenset[int]
    options: tuple[str, ...] = ("--frontends", "0")
    closed: int = 8
    connections: int = 64
    processes: int = 1
    precision: str = "fp32"
    compiles: bool = False

    def load(self, rate: float | None, seconds: float = SECONDS) -> Load:
        """Return a load; the closed loop without a rate."""
        connections = self.closed if rate is None else self.connections
        return Load(rate=rate, connections=connections, seconds=seconds, cpus=self.sender, processes=self.processes)


def one_core() -> Machine:
    """The first core serves, the others send.

    Raises:
        BenchError: There is one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("this machine has one core; the server needs one, and the load generator another.")
    return Machine(server=frozenset(cores[:1]), sender=frozenset(cores[1:]))


def one_gpu(device: str, precision: str) -> Machine:
    """Half of the cores serve with a GPU, the other half sends.

    Raises:
        BenchError: There are too few cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 4:
        raise BenchError(f"this machine has {len(cores)} cores; a server with a GPU and its load need at least 4.")
    half = len(cores) // 2
    return Machine(
        server=frozenset(cores[:half]),
        sender=frozenset(cores[half:]),
        options=("--device", device, "--precision", precision, "--frontends", str(max(1, min(4, half - 1)))),
        closed=256,
        connections=2048,
        processes=min(4, len(cores) - half),
        precision=precision,
        compiles=True,
    )


def vs_padded() -> list[float]:
    """Return the goodput at 50 ms over the rate of the same server with padded texts and no time limit.

    Raises:
        BenchError: The machine has one core only, or an answer was wrong.
    """
    return [_over_padded(one_core(), "app", "padded")]


def vs_padded_gpu() -> list[float]:
    """Return the same of a network of the size of BERT-base on a GPU.

    Raises:
        BenchError: The machine has fewer than four cores, an answer was wrong, or compiling took too long.
    """
    return [_over_padded(one_gpu("cuda:0", "bf16"), "base", "base_padded")]


def vs_peer() -> list[float]:
    """Return the goodput at 50 ms over that of Mosec with the same network, at the best of several batch sizes.

    Raises:
        BenchError: The machine has one core only, or an answer was wrong.
    """
    machine = one_core()
    with tempfile.TemporaryDirectory() as folder:
        bundle = _bundle("app", Path(folder) / "text")
        ours = max(result.goodput(BUDGET_MS) for result in _penstock(bundle, BUDGET_MS, machine))
        return [float(ours / _mosec(bundle, machine))]


def _over_padded(machine: Machine, name: str, padded_name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ours = _penstock(_bundle(name, Path(folder) / "text"), BUDGET_MS, machine)
        padded = _penstock(_bundle(padded_name, Path(folder) / "padded"), PADDED_MS, machine)
    goodput = max(result.goodput(BUDGET_MS) for result in ours)
    rate = max(result.answered_a_second for result in padded)
    print(f"{name}: {goodput:,.0f}/s within {BUDGET_MS} ms; padded: {rate:,.0f}/s", flush=True)
    return float(goodput / rate)


def _bundle(name: str, folder: Path) -> Path:
    found = find_application(f"{text.__file__}:{name}")
    torch.manual_seed(0)
    texts = text.padded_texts if name.endswith("padded") else text.texts
    count = BASE_EXAMPLES if name.startswith("base") else EXAMPLES
    Bundle.write(found, found.model(), texts(count), to=folder)
    return folder


def _penstock(bundle: Path, latency_ms: int, machine: Machine) -> list[LoadResult]:
    options = (*machine.options, "--latency-ms", str(latency_ms))
    with running_server(bundle, options, cpus=machine.server) as server:
        if machine.compiles:
            wait_compiled(server)
        return _loads(_loosened(golden_target(server.url, bundle), machine.precision), machine)


def _loosened(target: Target, precision: str) -> Target:
    """Allow what the server allows in a reduced precision."""
    if precision == "fp32" or target.record is None:
        return target
    record = target.record
    largest = max(float(abs(array).max()) for expected in record.expected for array in expected.values())
    allowed = TOLERANCES[precision] * largest
    agreement = replace(record.agreement, tolerance=max(record.agreement.tolerance, allowed))
    return replace(target, record=replace(record, agreement=agreement))


def _loads(target: Target, machine: Machine) -> list[LoadResult]:
    closed = measure(target, machine.load(None))
    rates = [closed.answered_a_second * share for share in LOADS]
    return [measure(target, machine.load(rate), none_answered=True) for rate in rates]


def _mosec(bundle: Path, machine: Machine) -> float:
    """Return the best goodput of Mosec: its queue is as long as the budget, and the rest is refused."""
    (core,) = machine.server
    rates: dict[int, float] = {}
    for batch in PEER_BATCHES:
        server = _mosec_server(batch, 1024)
        make_environment(server, print)
        with running(server, "text", bundle, core) as port:
            closed = measure(_mosec_target(bundle, port), machine.load(None, PEER_CLOSED_S))
            rates[batch] = closed.answered_a_second
    best: list[float] = []
    for batch in sorted(rates, key=lambda batch: rates[batch])[-PEER_BEST:]:
        queue = max(2 * batch, int(rates[batch] * BUDGET_MS / 1e3))
        with running(_mosec_server(batch, queue), "text", bundle, core) as port:
            results = _loads(_mosec_target(bundle, port), machine)
        best.append(max(result.goodput(BUDGET_MS) for result in results))
        print(f"Mosec, batches of {batch}, queue of {queue}: {best[-1]:,.1f}/s within {BUDGET_MS} ms", flush=True)
    return max(best)


def _mosec_server(batch: int, queue: int) -> ComparedServer:
    tuning = {"text": Tuning(max_batch=batch, max_wait_ms=1, max_queue=queue)}
    return ComparedServer(name="mosec", label="Mosec", path="/predict", tuning=tuning)


def _mosec_target(bundle: Path, port: int) -> Target:
    golden = read_bundle(bundle).golden
    bodies: Sequence[bytes] = [record["input_ids"][: int(record["tokens"])].tobytes() for record in golden.inputs]
    return Target(
        host="127.0.0.1",
        port=port,
        requests=tuple(request_bytes("127.0.0.1", port, "/predict", body, RAW) for body in bodies),
        answers=golden.outputs,
        tolerance=golden.tolerance,
    )


def main() -> None:
    """Measure the network of the size of BERT-base on a GPU, and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance.server.lengths", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    given = parser.parse_args()
    ratio = _over_padded(one_gpu(given.device, given.precision), "base", "base_padded")
    print(f"net.text_vs_padded on {given.device} in {given.precision}: {ratio:.2f}")


if __name__ == "__main__":
    main()
