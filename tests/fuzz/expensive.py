"""Search for inputs that cost much: mutations of the corpus, with processor time a byte as the objective.

    python -m tests.fuzz.expensive --seconds N [--target NAME] [--seed S]

Of each target the most expensive inputs replace those in penstock/bench/isolation/found, which `penstock bench
isolation` sends, and are added to the target's corpus, from which the continuous integration goes on.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from penstock.bench.isolation.expensive_inputs import FOUND
from tests.fuzz.mutate import CORPUS, mutations, seeds_of
from tests.fuzz.targets import TARGETS

# Those whose input is the body of a request, so that it can be sent.
SENT = ("infer", "chunk", "unpack", "picture", "frames")
KEPT = 3
# A head comes with every request: a body of one byte is not one byte.
HEAD_BYTES = 150
POOL = 24
ROUND = 60
REPEATS = 3


def cost_a_byte(target: Callable[[bytes], None], data: bytes) -> float:
    """Return the processor seconds a byte that is sent, the smallest of several."""
    spent_s: list[float] = []
    for _ in range(REPEATS):
        begin_s = time.process_time()
        target(data)
        spent_s.append(time.process_time() - begin_s)
    return min(spent_s) / (len(data) + HEAD_BYTES)


def search(name: str, seconds: float, seed: int) -> list[tuple[float, bytes]]:
    """Return the most expensive inputs found in a time, the most expensive first."""
    chance, target = random.Random(seed), TARGETS[name]
    pool = sorted(((cost_a_byte(target, data), data) for data in seeds_of(name)), reverse=True)[:POOL]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        changed = mutations([data for _, data in pool], chance)
        found = [next(changed) for _ in range(ROUND)]
        pool = sorted({*pool, *((cost_a_byte(target, data), data) for data in found)}, reverse=True)[:POOL]
    # Measured again: what was expensive by chance alone falls back.
    return sorted(((cost_a_byte(target, data), data) for _, data in pool), reverse=True)


def keep(name: str, found: list[tuple[float, bytes]], folders: list[Path]) -> None:
    """Write the most expensive inputs instead of those of an earlier search."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("expensive-*"):
            old.unlink()
        for number, (_, data) in enumerate(found[:KEPT]):
            (folder / f"expensive-{number}").write_bytes(data)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.expensive", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="a target")
    parser.add_argument("--target", choices=SENT, help="one target; all by default")
    parser.add_argument("--seed", type=int, default=1, help="of chance")
    arguments = parser.parse_args()
    for name in [arguments.target] if arguments.target else SENT:
        before = max(cost_a_byte(TARGETS[name], data) for data in seeds_of(name) if data)
        found = search(name, arguments.seconds, arguments.seed)
        keep(name, found, [FOUND / name, CORPUS / name])
        print(f"{name:8} {found[0][0] * 1e6:8.3f} us a byte, before {before * 1e6:.3f}", flush=True)


if __name__ == "__main__":
    main()
