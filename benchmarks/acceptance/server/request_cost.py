"""Processor time of a request of Penstock over that of a peer, in the same run."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.models.write import write_bundle
from benchmarks.peers.golden_requests import checked_target
from benchmarks.peers.peer_process import make_environment, running_peer
from benchmarks.peers.servers import HOME, PENSTOCK, ComparedServer, select_servers
from penstock.bench.load.generator import Load, measure
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError

MODEL, PEER = "cnn", "mosec"
SERVER_CORE, LOAD_CORE = 0, 1
CONNECTIONS = 64

Say = Callable[[str], None]


def request_ratio(repeat: int, seconds: float, say: Say, bundle: Path | None = None, peer: str = PEER) -> list[float]:
    """Return the user and system time a request of Penstock over that of a peer, for each repetition.

    Both serve the same bundle on the same core, one after the other; all processes of a server count.

    Args:
        repeat: Repetitions, the order in alternation.
        seconds: Duration of each load.
        say: Called with a sentence for each repetition.
        bundle: The bundle that is served; None for the CNN of `benchmarks/models`.
        peer: Name of the peer, which has the tuning of the CNN.

    Raises:
        BenchError: A server did not start, or an answer was wrong.
    """
    servers = [PENSTOCK, *select_servers([peer])]
    for server in servers:
        make_environment(server, say)
    served = bundle or write_bundle(MODEL, HOME / "bundles" / MODEL).folder
    ratios: list[float] = []
    for repetition in range(repeat):
        order = servers if repetition % 2 == 0 else servers[::-1]
        cost_us = {server.name: _request_us(server, served, seconds) for server in order}
        ratios.append(cost_us[PENSTOCK.name] / cost_us[peer])
        say(f"{repetition + 1} of {repeat}: " + ", ".join(f"{name} {us:.1f} us" for name, us in cost_us.items()))
    return ratios


def _request_us(server: ComparedServer, bundle: Path, seconds: float) -> float:
    name = read_bundle(bundle).manifest.name
    load = Load(
        rate=None,
        connections=CONNECTIONS,
        seconds=seconds,
        warm_up_s=0.0,
        cpus=frozenset({LOAD_CORE}),
        sender="auto",
    )
    with running_peer(server, MODEL, bundle, SERVER_CORE) as running:
        target = checked_target(server, name, bundle, running.port)
        measure(target, load)
        begin_s = running.cpu_seconds()
        result = measure(target, load)
        spent_s = running.cpu_seconds() - begin_s
    if not result.latency_s.size:
        raise BenchError(f"{server.label} answered nothing.")
    return spent_s * 1e6 / result.latency_s.size
