"""Goodput of the scheduler in simulation, beside other batching policies and the offline optimum."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.acceptance.report.results import ROOT
from benchmarks.acceptance.scheduler.arrival_traces import KINDS, generated, recorded
from benchmarks.acceptance.scheduler.simulation import POLICIES, ArrivalTrace, SimulatedMachine, in_time, optimum
from penstock.bench.measurement import Comparison, Measurement, make_measurement

# Approximate requests of a trace. Several budgets long even at three times the capacity, so that its ends do not
# matter.
REQUESTS = 1600
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SEED = 0
MACHINES = (
    SimulatedMachine(name="a CPU", overhead_ms=2.0, row_ms=0.8, max_batch=16),
    SimulatedMachine(name="a GPU", overhead_ms=8.0, row_ms=0.2, max_batch=16),
)
SHIPPED = ROOT / "benchmarks" / "traces"
PICTURE = ROOT / "docs" / "assets" / "scheduler.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPoint:
    """One trace at one load on one machine.

    Args:
        machine: The machine's name.
        trace: The trace's name.
        load: Offered requests over the machine's capacity in its largest batches.
        offered: Requests.
        kept: Requests answered in time, by policy.
        optimum: The most that any schedule answers in time, without noise; None where deadlines are not in the order of
            arrival.
    """

    machine: str
    trace: str
    load: float
    offered: int
    kept: dict[str, int]
    optimum: int | None


def simulate(files: list[Path], say: Callable[[str], None]) -> list[SimulatedPoint]:
    """Simulate every machine, trace and load.

    Args:
        files: Recorded traces besides the shipped ones.
        say: Called with a sentence for each machine and trace.
    """
    points: list[SimulatedPoint] = []
    for machine in MACHINES:
        rates = [load * machine.capacity for load in LOADS]
        traces = {kind: [generated(kind, rate, REQUESTS / rate, SEED) for rate in rates] for kind in KINDS}
        for file in (*sorted(SHIPPED.glob("*.csv")), *files):
            traces[file.stem] = [recorded(file, rate) for rate in rates]
        for name, at_rates in traces.items():
            say(f"{machine.name}: {name}")
            points += [_point(machine, trace, load) for trace, load in zip(at_rates, LOADS, strict=True)]
    return points


def overall(points: list[SimulatedPoint]) -> dict[str, float]:
    """Return the share of the optimum that each policy reaches, over all points that have one."""
    known = [point for point in points if point.optimum]
    return {
        name: sum(point.kept[name] for point in known) / sum(point.optimum or 0 for point in known) for name in POLICIES
    }


def measurement_of(points: list[SimulatedPoint]) -> Measurement:
    """Return the share of the optimum, beside the best of the other policies."""
    shares = overall(points)
    best = max((name for name in POLICIES if name != "penstock"), key=lambda name: shares[name])
    peer = Comparison(name=best, median=shares[best], ratio=shares["penstock"] / shares[best])
    workload = (
        f"simulation: {len({point.trace for point in points})} traces, loads {LOADS[0]:g} to {LOADS[-1]:g} of capacity"
    )
    metric = "requests answered in time over the exact offline optimum"
    return make_measurement([shares["penstock"]], workload=workload, metric=metric, unit="fraction", peer=peer)


def draw(points: list[SimulatedPoint], file: Path = PICTURE) -> Path:
    """Plot goodput over offered load, a panel for each machine and trace."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(point.trace for point in points))
    machines = list(dict.fromkeys(point.machine for point in points))
    figure = Figure(figsize=(3 * len(traces), 2.6 * len(machines) + 0.6), layout="constrained", facecolor="white")
    panels = figure.subplots(len(machines), len(traces), squeeze=False, sharex=True, sharey=True)
    for row, machine in enumerate(machines):
        for column, trace in enumerate(traces):
            axes = panels[row][column]
            here = [point for point in points if (point.machine, point.trace) == (machine, trace)]
            loads = [point.load for point in here]
            capacity = [point.offered / point.load for point in here]
            for name in POLICIES:
                goodput = [point.kept[name] / most for point, most in zip(here, capacity, strict=True)]
                axes.plot(loads, goodput, marker="o", markersize=3, label=name)
            if all(point.optimum is not None for point in here):
                best = [(point.optimum or 0) / most for point, most in zip(here, capacity, strict=True)]
                axes.plot(loads, best, "k--", linewidth=1, label="offline optimum")
            axes.set_title(f"{trace}, {machine}", fontsize=9)
            axes.grid(alpha=0.3)
    figure.supxlabel("offered load over capacity", fontsize=9)
    figure.supylabel("answered in time over capacity", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file


def _point(machine: SimulatedMachine, trace: ArrivalTrace, load: float) -> SimulatedPoint:
    agreeable = bool((trace.deadline_s[1:] >= trace.deadline_s[:-1]).all())
    return SimulatedPoint(
        machine=machine.name,
        trace=trace.name,
        load=load,
        offered=len(trace.arrival_s),
        kept={name: in_time(trace, policy(trace, machine, SEED)) for name, policy in POLICIES.items()},
        optimum=optimum(trace, machine) if agreeable else None,
    )
