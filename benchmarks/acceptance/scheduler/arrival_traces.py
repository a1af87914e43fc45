"""Arrival traces for the simulation: generated ones of several kinds, and recorded ones from files."""

from pathlib import Path

import numpy as np

from benchmarks.acceptance.scheduler.simulation import ArrivalTrace, Floats
from penstock.core.errors import BenchError

BUDGET_S = 0.05
KINDS = ("steady", "bursts", "ramp", "flash crowd")
BURST_S, QUIET_S, BURST_FACTOR = 0.05, 0.15, 3.0


def generated(kind: str, rate: float, seconds: float, seed: int) -> ArrivalTrace:
    """Generate a trace of about `rate` requests a second on average.

    Args:
        kind: `"steady"` is a Poisson process, `"bursts"` one whose rate jumps at random (Markov-modulated), `"ramp"`
            grows from nothing to twice the rate, `"flash crowd"` has a fifth of its requests in a twentieth of the
            time.
        rate: Requests a second on average.
        seconds: Duration.
        seed: Seed of the arrivals.
    """
    rng = np.random.default_rng(seed)
    step_s = 0.001
    steps = round(seconds / step_s)
    intensity = _intensity(kind, steps, step_s, rng)
    expected = rate * step_s * intensity / intensity.mean()
    counts = rng.poisson(expected)
    arrivals = np.sort((np.repeat(np.arange(steps), counts) + rng.random(int(counts.sum()))) * step_s)
    return ArrivalTrace(name=kind, arrival_s=arrivals, budget_s=np.full(len(arrivals), BUDGET_S))


def recorded(file: Path, rate: float) -> ArrivalTrace:
    """Read a recorded trace and scale its time to a rate.

    Args:
        file: CSV with the columns `arrival_s` and `budget_ms`; lines that begin with # are comments.
        rate: Requests a second on average.

    Raises:
        BenchError: The file is not such a CSV.
    """
    try:
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0] == "arrival_s,budget_ms", lines[0]
        table = np.array([[float(cell) for cell in line.split(",")] for line in lines[1:]])
        arrival_s, budget_s = table[:, 0], table[:, 1] / 1e3
    except (OSError, ValueError, IndexError, AssertionError) as error:
        raise BenchError(f"{file} is not a trace ({error}); its columns are arrival_s,budget_ms.") from None
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order] - arrival_s.min()
    stretched = arrival_s * (len(arrival_s) / rate / max(arrival_s[-1], 1e-9))
    return ArrivalTrace(name=file.stem, arrival_s=stretched, budget_s=budget_s[order])


def _intensity(kind: str, steps: int, step_s: float, rng: np.random.Generator) -> Floats:
    place = np.linspace(0, 1, steps)
    if kind == "steady":
        return np.ones(steps)
    if kind == "ramp":
        return 0.02 + place
    if kind == "flash crowd":
        return np.where((place > 0.5) & (place < 0.55), 4.75, 1.0)
    if kind != "bursts":
        raise BenchError(f"there is no kind of trace {kind!r}; there are {', '.join(KINDS)}.")
    intensity, burst, begin = np.ones(steps), False, 0
    while begin < steps:
        length = max(1, int(rng.exponential(BURST_S if burst else QUIET_S) / step_s))
        intensity[begin : begin + length] = BURST_FACTOR if burst else 1.0
        begin, burst = begin + length, not burst
    return intensity
