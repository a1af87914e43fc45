"""The train command of benchmarks.acceptance trains the cases that it is told to measure."""

from pathlib import Path

import pytest
import torch

from benchmarks.acceptance.report.results import ROOT
from benchmarks.acceptance.train.train_case import read_cases
from benchmarks.acceptance.train.train_methods import numeric_settings, recipe_of
from benchmarks.acceptance.train.train_scaling import CaseResult, measurements_of

CASES = sorted((ROOT / "benchmarks" / "cases").glob("train_*.json"))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_every_case_that_is_kept_can_be_told_from_the_others(file: Path) -> None:
    cases = read_cases(file)
    found = [CaseResult(case=case, processes=1, rates=[1.0], losses=[1.0, 1.0]) for case in cases]
    rates = [line.workload for line in measurements_of(found, "GPUs") if line.unit == "images/s"]
    assert len(set(rates)) == len(rates)


def test_a_choice_is_what_is_trained_with() -> None:
    cases = read_cases(ROOT / "benchmarks" / "cases" / "train_choices.json")
    seen = {}
    for case in cases[:6]:
        recipe = recipe_of(case)
        with numeric_settings(case):
            deterministic = torch.are_deterministic_algorithms_enabled()
            assert deterministic == recipe.execution.deterministic != torch.backends.cudnn.benchmark
            assert torch.backends.cudnn.allow_tf32 == (recipe.precision == "tf32")
        seen[case.label] = recipe.precision, deterministic, recipe.execution.graph, recipe.execution.compile
    assert seen == {
        "penstock, compiled": ("bf16", False, True, True),
        "penstock, compiled, deterministic=True": ("bf16", True, True, True),
        "penstock, compiled, graph=False": ("bf16", False, False, True),
        "penstock, compiled, precision=fp32": ("fp32", False, True, True),
        "penstock, compiled, precision=tf32": ("tf32", False, True, True),
        "penstock, compiled, precision=fp16": ("fp16", False, True, True),
    }
    assert [case.label for case in cases[6:]] == list(seen)
