"""Goodput on one GPU over the best peer's with the same compiled network, in the same run."""

from benchmarks.peers.gpu import LIMIT_S, TUNINGS, compare, installed, ratio_of


def vs_best_peer(name: str = "resnet50") -> list[float]:
    """Return the highest Poisson rate with 99% of all requests within the budget, over that of the best peer.

    Args:
        name: An application of `benchmarks/models/gpu_networks.py`.

    Raises:
        BenchError: An answer was wrong, or no peer kept the budget at any rate.
    """

    def say(text: str) -> None:
        print(text, flush=True)

    names = installed(["penstock", *TUNINGS], say)
    return [ratio_of(compare(name, "cuda", names, limit_s=LIMIT_S, say=say), say)]
