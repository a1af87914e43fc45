"""benchmarks/figures.toml: functions that exist, their arguments and constants, and the units of the targets."""

import inspect
import tomllib
from types import SimpleNamespace

import pytest

from benchmarks.acceptance import figures
from benchmarks.acceptance.figures import FIGURES, Repetitions, measure_figures, read_figures
from benchmarks.acceptance.report.performance_page import read_targets
from penstock.bench.measurement import Measurement
from penstock.core.errors import BenchError

AREAS = list(tomllib.loads(FIGURES.read_text()))


@pytest.mark.parametrize("area", AREAS)
def test_every_figure_can_be_measured_as_it_is_listed(area: str) -> None:
    units = {target.id: target.unit for target in read_targets()}
    for name, figure in read_figures(area).items():
        measure, workload, metric = figure.load()
        inspect.signature(measure).bind(**figure.arguments, **dict.fromkeys(figure.needs))
        assert not {"{", "}", "\n"} & set(workload + metric), name
        assert figure.unit == units.get(name, figure.unit), name


def test_a_figure_whose_options_are_missing_is_left_out() -> None:
    with pytest.raises(BenchError, match=r"no figure device\.sameness; there are device\.images\.accuracy\.$"):
        measure_figures("device", ["device.sameness"], record=False, say=pytest.fail)


def test_what_was_counted_stands_beside_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Measurement] = []
    counted = SimpleNamespace(chaos_stuck=lambda: Repetitions([0.0], "7 faults in all"), SEEDS=1, CHAOS_S=2.0)
    monkeypatch.setattr(figures, "import_module", lambda name: counted)
    monkeypatch.setattr(figures, "record_result", lambda line, area: recorded.append(line))
    measure_figures("server", ["chaos.stuck"], record=True, say=lambda said: None)
    (line,) = recorded
    assert line.workload.endswith("an app that imports torch; 7 faults in all")
    assert line.median == 0
