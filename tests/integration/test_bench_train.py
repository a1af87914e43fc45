"""`python -m benchmarks.acceptance train` on the CPU: methods without a GPU, a failing case, lines."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.acceptance.__main__ import app
from benchmarks.acceptance.train.train_case import TrainingCase
from benchmarks.acceptance.train.train_scaling import CaseResult, best, measurements_of, run_cases
from penstock.core.errors import BenchError


@pytest.mark.slow
def test_ways_are_measured_beside_each_other(tmp_path: Path) -> None:
    out = tmp_path / "train.jsonl"
    words = ["train", "--processes", "1", "--processes", "2", "--model", "mlp", "--batch", "64"]
    words += ["--method", "penstock", "--method", "ddp", "--no-compiled", "--seconds", "0.05", "--repeat", "2"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rates = [line for line in lines if line["unit"] == "samples/s"]
    assert [line["repetitions"] for line in rates] == [2] * 4
    assert all(line["median"] > 0 for line in rates)
    ratios = [line["workload"] for line in lines if line["unit"] == "ratio"]
    assert len(ratios) == 2
    assert ratios[0].startswith("small MLP, global batch 64, 2 processes, penstock, over 1 processes, batch 64, ")
    assert ratios[1].endswith("over 2 processes, batch 64, ddp")


@pytest.mark.thorough
def test_a_case_that_fails_is_named_and_the_others_are_measured() -> None:
    said: list[str] = []
    cases = [
        TrainingCase(model="mlp", batch=1, method="penstock"),
        TrainingCase(model="mlp", batch=64, method="penstock"),
    ]
    found = list(run_cases(cases, 2, device="cpu", seconds=0.05, repeat=1, say=said.append))
    assert [bool(each.rates) for each in found] == [False, True]
    assert found[0].error is not None
    assert "less than an example for each of 2 processes" in found[0].error


def test_a_speed_up_is_over_the_fastest_on_one_whoevers_it_is() -> None:
    def measured(method: str, processes: int, rate: float) -> CaseResult:
        case = TrainingCase(model="alexnet", batch=256, method=method)  # pyright: ignore[reportArgumentType]
        return CaseResult(case=case, processes=processes, rates=[rate], losses=[1.0, 1.0])

    found = [
        measured("penstock", 1, 100),
        measured("captured ddp", 1, 110),
        measured("penstock", 4, 330),
        measured("captured ddp", 4, 220),
    ]
    lines = {line.id: line.median for line in measurements_of(found, "GPUs") if line.unit == "ratio"}
    assert lines == {
        "train.alexnet.strong_256_x4": pytest.approx(3.0),
        "train.alexnet.vs_captured_ddp_256": pytest.approx(1.5),
    }
    with pytest.raises(BenchError, match="resnet50 at batch 256 on 4 was not measured"):
        best(found, processes=4, model="resnet50", batch=256)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "1", "--processes", "1"], "--gpus and --processes contradict each other"),
        (["--model", "lenet"], "there is no network 'lenet'"),
        (["--method", "horovod"], "there is no method 'horovod'"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exit_code != 0
    assert sentence in str(done.exception)
