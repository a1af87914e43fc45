"""benchmarks/figures.toml: functions that exist, their arguments and constants, and the units of the targets."""

import inspect
import tomllib

import pytest

from benchmarks.acceptance.figures import FIGURES, measure_figures, read_figures
from benchmarks.acceptance.report.performance_page import read_targets
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
