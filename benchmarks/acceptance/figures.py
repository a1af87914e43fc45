"""Every figure that needs no load generator, as benchmarks/figures.toml lists them by area."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.acceptance.report.performance_page import read_targets
from benchmarks.acceptance.report.results import ROOT, record_result
from penstock.bench.measurement import make_measurement
from penstock.core.errors import BenchError

FIGURES = ROOT / "benchmarks" / "figures.toml"


@dataclass(frozen=True, slots=True)
class Repetitions:
    """The repetitions of a figure, with what else must be known of them.

    Args:
        values: The repetitions.
        note: What is added to the workload, such as a number of events that was counted.
    """

    values: list[float]
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSpec:
    """A figure and the function that measures it.

    Args:
        measure: `module:function` below `benchmarks.acceptance`. It returns the repetitions, after it checked the
            answers; or `Repetitions`.
        workload: What is measured, in words; `{NAME}` is a constant of that module.
        metric: The meaning of the number, likewise.
        unit: Its unit.
        needs: Options of the command that the function takes.
        arguments: Its other arguments.
    """

    measure: str
    workload: str
    metric: str
    unit: str
    needs: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> tuple[Callable[..., list[float] | Repetitions], str, str]:
        """Import the function; return it with the workload and the metric in words."""
        module, _, function = self.measure.partition(":")
        constants = vars(import_module(f"benchmarks.acceptance.{module}"))
        return constants[function], self.workload.format_map(constants), self.metric.format_map(constants)


def read_figures(area: str) -> dict[str, FigureSpec]:
    """Return the figures of an area by id, in the order in which they are measured."""
    return {name: FigureSpec(**fields) for name, fields in tomllib.loads(FIGURES.read_text())[area].items()}


def measure_figures(
    area: str,
    ids: Sequence[str],
    *,
    record: bool,
    say: Callable[[str], None],
    options: str = "",
    given: Mapping[str, Any] | None = None,
    by_name: Sequence[str] = (),
) -> None:
    """Measure some of the figures of an area, or all.

    Args:
        area: The area, which names its command and results file.
        ids: Ids to measure; all if empty.
        record: Append each measurement to the results.
        say: Called with a sentence for each.
        options: Other options of the command that repeats them.
        given: Values of options; a figure that needs another option is left out.
        by_name: Ids that are measured only by name.

    Raises:
        BenchError: There is no such figure, or one cannot be trusted.
    """
    given = given or {}
    figures = {name: figure for name, figure in read_figures(area).items() if given.keys() >= set(figure.needs)}
    unknown = [name for name in ids if name not in figures]
    if unknown:
        raise BenchError(f"there is no figure {', '.join(unknown)}; there are {', '.join(figures)}.")
    targets = {target.id for target in read_targets()}
    for name in ids or [name for name in figures if name not in by_name]:
        figure = figures[name]
        measure, workload, metric = figure.load()
        values = measure(**figure.arguments, **{option: given[option] for option in figure.needs})
        if isinstance(values, Repetitions):
            values, workload = values.values, f"{workload}; {values.note}"
        line = make_measurement(
            values,
            id=name if name in targets else None,
            workload=workload,
            metric=metric,
            unit=figure.unit,
            command=f"python -m benchmarks.acceptance {area.replace('_', '-')}{options} --only {name}",
        )
        say(f"{name}: median {line.median:.5g} {figure.unit} ({line.p10:.5g} to {line.p90:.5g}, {len(values)} runs)")
        if record:
            record_result(line, area)
