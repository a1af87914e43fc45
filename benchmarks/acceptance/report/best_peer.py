"""The fastest peer of one day on one hardware model, and the ratio to it."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.peers.servers import PEERS, PENSTOCK
from penstock.bench.measurement import Measurement

# Targets that are asked over the fastest of all peers.
ID_SUFFIX = "_vs_best_peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class BestPeer:
    """The fastest peer that was measured on the day of a ratio.

    Args:
        name: Its label.
        ratio: Penstock's figure over its figure.
        measured: Number of peers measured that day.
    """

    name: str
    ratio: float
    measured: int

    @property
    def is_complete(self) -> bool:
        """True if every peer was measured that day."""
        return self.measured == len(PEERS)

    @property
    def description(self) -> str:
        """The ratio with the peer's name, and the number of peers that it is the fastest of."""
        ratio = f"{self.ratio:.2f} x {self.name}"
        if self.is_complete:
            return f"{ratio}, the fastest of {len(PEERS)} peers"
        return f"{ratio} ({self.measured} of {len(PEERS)} peers measured that day)"


def best_peer(ratio: Measurement, measurements: Iterable[Measurement]) -> BestPeer | None:
    """Find the fastest peer of the day on which a ratio was measured, on the same hardware.

    Args:
        ratio: A line of `benchmarks.peers.run` that answers a target over the best peer.
        measurements: Every line; the peers' own rates are among them.

    Returns:
        None where the ratio is of another kind, or no peer's rate was kept that day.
    """
    if ratio.id is None or not ratio.id.endswith(ID_SUFFIX):
        return None
    model, _, load_and_metric = ratio.workload.rpartition(", over ")[0].partition(", ")
    load, _, metric = load_and_metric.rpartition(": ")
    same_day = {
        each.workload: each.median
        for each in measurements
        if (each.date[:10], each.hardware, each.metric) == (ratio.date[:10], ratio.hardware, metric)
    }

    def rate(label: str) -> float:
        return same_day.get(f"{model} served by {label} on one core, {load}", 0.0)

    ours = rate(PENSTOCK.label)
    known = {server.label: rate(server.label) for server in PEERS if rate(server.label) > 0}
    if not known or not ours:
        return None
    name = max(known, key=lambda label: known[label])
    same_run = ratio.peer is not None and ratio.peer.name == name
    # The median over repetitions of one run, where the fastest peer was in that run.
    return BestPeer(name=name, ratio=ratio.median if same_run else ours / known[name], measured=len(known))
