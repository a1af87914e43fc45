"""The load generator's arithmetic, without a server."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from penstock.bench import compiled_program
from penstock.bench.compiled_program import checked_kind
from penstock.bench.load import generator as load_module
from penstock.bench.load import golden_target as target_module
from penstock.bench.load.compiled_sender import sender_program
from penstock.bench.load.generator import Load, LoadResult, NoRateWithinBudget, find_goodput, poisson
from penstock.bench.load.golden_target import served_application
from penstock.bench.load.record_answers import record_answers
from penstock.bench.load.sender import Target
from penstock.client.binary_tensors import request_body
from penstock.core.bundles.golden import Golden
from penstock.core.dim import Dim
from penstock.core.errors import BenchError
from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec

LOAD = Load(rate=1000, connections=8, seconds=2, warm_up_s=0.5)
NOWHERE = Target(host="nowhere", port=1, requests=(b"",), answers=None, tolerance=0)


def measured(latency_s: list[float], offered: int | None = None, load: Load = LOAD) -> LoadResult:
    count = len(latency_s) if offered is None else offered
    return LoadResult(
        load=load,
        seconds=2.0,
        latency_s=np.array(latency_s),
        offered=count,
        refused=count - len(latency_s),
        failed=0,
        wrong=0,
        lost=0,
        checked=len(latency_s),
    )


def test_shares_are_of_all_requests_due_not_of_those_answered() -> None:
    result = measured([0.01] * 90 + [0.2] * 5, offered=100)
    assert result.share_within(50) == 0.9
    assert result.goodput(50) == 45
    assert result.answered_a_second == 47.5
    assert result.percentile_ms(50) == pytest.approx(10)
    assert measured([], offered=10).percentile_ms(50) == float("inf")


def test_delays_of_the_senders_are_reported() -> None:
    right = measured([0.01] * 9, offered=10)
    refused = "10.00% refused; p99 of the answers 10.0 ms"
    assert not right.was_late
    assert right.shortfall == f" ({refused})"
    assert replace(right, offered=100, refused=0, late=1).was_late is False
    late = replace(right, late=1, queued=5)
    assert late.was_late
    assert late.shortfall == f" ({refused}; 10.00% sent late by the load itself; 50.00% waited for a free connection)"
    assert replace(measured([0.01]), queued=1).shortfall == " (100.00% waited for a free connection)"


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    moments = poisson(5000, replace(LOAD, seconds=20), 0)
    gaps = np.diff(moments)
    assert len(moments) == pytest.approx(5000 * 20.5, rel=0.02)
    assert moments[-1] < 20.5
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert not np.array_equal(moments[:10], poisson(5000, replace(LOAD, seconds=20), 1)[:10])


def test_the_goodput_search_finds_where_a_server_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def server(target: Target, load: Load, *, none_answered: bool) -> LoadResult:
        assert none_answered
        assert load.rate is not None
        late = 0.2 if load.rate > 3210 else 0.01
        return measured([0.01] * 98 + [late] * 2, load=load)

    monkeypatch.setattr(load_module, "measure", server)
    best, trials = find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000)
    assert 3210 * 0.95 < best <= 3210
    assert len({trial.load.seed for trial in trials}) == len(trials)

    monkeypatch.setattr(load_module, "measure", lambda target, load, none_answered: measured([1.0], load=load))
    with pytest.raises(NoRateWithinBudget, match=r"even .* requests a second are not answered"):
        find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000)


def test_one_pause_of_the_machine_does_not_make_a_rate_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[float, int] = {}

    def paused_at_first(target: Target, load: Load, *, none_answered: bool) -> LoadResult:
        assert load.rate is not None
        tried[load.rate] = tried.get(load.rate, 0) + 1
        return measured([0.01 if tried[load.rate] > 1 and load.rate < 3210 else 0.2], load=load)

    monkeypatch.setattr(load_module, "measure", paused_at_first)
    best, trials = find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000, attempts=2)
    assert 3210 * 0.95 < best <= 3210
    assert set(tried.values()) == {2}
    assert len({trial.load.seed for trial in trials}) == len(trials)


def test_an_answer_is_wrong_if_it_differs_is_nan_or_has_another_length() -> None:
    answers = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    target = replace(NOWHERE, answers=answers, tolerance=0.1, preamble_nbytes=1)

    def body(output: np.ndarray) -> bytes:
        return b"!" + output.tobytes()

    right = [(which, body(answers[which] + 0.05)) for which in (2, 0)]
    assert target.count_wrong(right) == 0
    assert target.count_wrong([*right, (1, body(answers[2])), (1, body(answers[1] * np.nan)), (1, b"!")]) == 3
    assert target.count_wrong([(1, b"!")]) == 1
    assert NOWHERE.count_wrong([(0, b"anything")]) == target.count_wrong([]) == 0


@pytest.mark.parametrize("form", ["json", "binary"])
def test_several_tensors_are_compared_one_by_one(form: Literal["json", "binary"]) -> None:
    boxes = Dim("boxes", max=3, min=0)
    large = TensorSpec(name="large", dtype="float32", shape=(boxes, 2), meaning="corners")
    small = TensorSpec(name="small", dtype="float32", shape=(2,), meaning="scores")
    output = RecordSpec((large, small))
    right = [
        {"large": np.full((count, 2), 1000, np.float32), "small": np.array([0.25, 0.75], np.float32)}
        for count in (2, 0)
    ]
    golden = Golden(inputs=np.zeros((2, 4)), outputs=np.stack(list(map(output.check, right))), tolerance=0.1)
    target = replace(NOWHERE, answers=golden.outputs, record=record_answers(golden, output, form))

    def body(which: int, **changes: Any) -> bytes:
        arrays = right[which] | changes
        if form == "json":
            return json.dumps({name: array.tolist() for name, array in arrays.items()}).encode()
        lengths = {"boxes": np.array(len(arrays["large"]))}
        return request_body({name: array[None] for name, array in (arrays | lengths).items()})[0].replace(
            b'"inputs"', b'"outputs"', 1
        )

    close = right[0]["large"] + np.float32(0.09)
    assert target.count_wrong([(0, body(0)), (1, body(1)), (0, body(0, large=close))]) == 0
    # The tolerance of 0.1 is that of the largest tensor.
    for which, changes in (
        (0, {"large": right[0]["large"] + 1}),
        (0, {"small": right[0]["small"] + np.float32(0.01)}),
        (0, {"small": right[0]["small"] * np.nan}),
        (0, {"large": right[1]["large"]}),
        (1, {"large": right[0]["large"]}),
    ):
        assert target.count_wrong([(which, body(which, **changes))]) == 1, changes
    assert target.count_wrong([(0, b""), (0, b"[]"), (0, b'{"large": 3}'), (0, bytes(40))]) == 4


def test_the_search_goes_on_from_a_rate_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def server(target: Target, load: Load, *, none_answered: bool) -> LoadResult:
        assert load.rate is not None
        return measured([0.2 if load.rate > 3210 else 0.01], load=load)

    monkeypatch.setattr(load_module, "measure", server)
    best, trials = find_goodput(NOWHERE, LOAD, budget_ms=50, lowest=3000, highest=4000)
    assert 3210 * 0.95 < best <= 3210
    assert all(trial.load.rate is not None and trial.load.rate > 3000 for trial in trials)


def test_without_a_compiler_the_python_sender_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_program, "COMPILERS", ())
    assert checked_kind("auto") == "python"
    assert sender_program("auto", tmp_path) is None
    with pytest.raises(BenchError, match="install g\\+\\+, or choose python"):
        checked_kind("compiled")
    monkeypatch.setattr(compiled_program, "COMPILERS", ("false",))
    with pytest.raises(BenchError, match="Choose the python sender"):
        sender_program("compiled", tmp_path)
    with pytest.raises(BenchError, match="--sender is 'rust'; choose one of auto, compiled, python"):
        checked_kind("rust")


def test_a_load_out_of_range_is_refused() -> None:
    with pytest.raises(BenchError, match="--seconds is 0; it must be above 0"):
        replace(LOAD, seconds=0)


def test_a_server_that_starts_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "urlopen", lambda url, timeout: io.BytesIO(b'{"apps": []}'))
    with pytest.raises(BenchError, match="serves no model; while it starts, wait until http://here/v2/health/ready"):
        served_application("http://here/")
    with pytest.raises(BenchError, match="does not serve 'digits'"):
        served_application("http://here/", "digits")


def test_of_several_models_the_one_of_the_bundle_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = b'{"apps": [{"name": "digits", "bundle": "a"}, {"name": "iris", "bundle": "b"}]}'
    monkeypatch.setattr(target_module, "urlopen", lambda url, timeout: io.BytesIO(apps))
    assert served_application("http://here/", content_hash="b")["name"] == "iris"
    assert served_application("http://here/", content_hash="c")["name"] == "digits"
