"""One load on one server from a process of its own, for the demo: prints what came of it as a line of JSON.

A process of its own, because a load generator must share neither an interpreter nor a core with whoever shows its
progress, and can be ended at once by ending its process group.
"""

import argparse
import json
import sys
from pathlib import Path

from penstock.bench.load import Load, Measured, measure
from penstock.bench.target import golden_target
from penstock.core.errors import PenstockError

PERCENTILES = (50, 98, 99)


def figures(measured: Measured, budget_ms: float) -> dict[str, float]:
    """What the demo's report shows of a measurement; latencies in milliseconds, infinity as the largest float."""
    percentiles = {f"p{percent}_ms": measured.percentile_ms(percent) for percent in PERCENTILES}
    return {
        "offered": measured.offered,
        "answered_a_second": measured.answered_a_second,
        "share_within": measured.share_within(budget_ms),
        "refused": measured.refused,
        "failed": measured.failed + measured.lost,
        "checked": measured.checked,
        **{name: min(value, sys.float_info.max) for name, value in percentiles.items()},
    }


def main() -> None:
    """Read the load from the command line, put it on the server, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.drive", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rate", type=float, help="requests a second; without it, the closed loop")
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-up-s", type=float, required=True)
    parser.add_argument("--budget-ms", type=float, required=True)
    parser.add_argument("--cpus", required=True, help="the cores that send, 1 or 1,2")
    given = parser.parse_args()
    load = Load(
        rate=given.rate,
        connections=given.connections,
        seconds=given.seconds,
        warm_up_s=given.warm_up_s,
        cpus=frozenset(map(int, given.cpus.split(","))),
    )
    try:
        measured = measure(golden_target(given.url, given.bundle), load)
    except PenstockError as error:
        sys.exit(str(error))
    print(json.dumps(figures(measured, given.budget_ms)))


if __name__ == "__main__":
    main()
