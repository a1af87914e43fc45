"""The load generator's arithmetic, without a server."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.bench import load as load_module
from penstock.bench import report, results
from penstock.bench.client import Target
from penstock.bench.load import Load, Measured, NoRateKept, find_goodput, poisson
from penstock.bench.report import Target as Asked
from penstock.bench.report import page, read_targets, rows_of
from penstock.bench.results import Line, Peer, line_of
from penstock.core.errors import BenchError

LOAD = Load(rate=1000, connections=8, seconds=2, warm_up_s=0.5)
NOWHERE = Target(host="nowhere", port=1, requests=(b"",), answers=None, tolerance=0)


def measured(latency_s: list[float], offered: int | None = None, load: Load = LOAD) -> Measured:
    count = len(latency_s) if offered is None else offered
    return Measured(
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


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    moments = poisson(5000, replace(LOAD, seconds=20), 0)
    gaps = np.diff(moments)
    assert len(moments) == pytest.approx(5000 * 20.5, rel=0.02)
    assert moments[-1] < 20.5
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert not np.array_equal(moments[:10], poisson(5000, replace(LOAD, seconds=20), 1)[:10])


def test_the_goodput_search_finds_where_a_server_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def server(target: Target, load: Load, *, none_answered: bool) -> Measured:
        assert none_answered
        assert load.rate is not None
        late = 0.2 if load.rate > 3210 else 0.01
        return measured([0.01] * 98 + [late] * 2, load=load)

    monkeypatch.setattr(load_module, "measure", server)
    best, trials = find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000)
    assert 3210 * 0.95 < best <= 3210
    assert len({trial.load.seed for trial in trials}) == len(trials)

    monkeypatch.setattr(load_module, "measure", lambda target, load, none_answered: measured([1.0], load=load))
    with pytest.raises(NoRateKept, match=r"even .* requests a second are not answered"):
        find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000)


def test_one_pause_of_the_machine_does_not_make_a_rate_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[float, int] = {}

    def paused_at_first(target: Target, load: Load, *, none_answered: bool) -> Measured:
        assert load.rate is not None
        tried[load.rate] = tried.get(load.rate, 0) + 1
        return measured([0.01 if tried[load.rate] > 1 and load.rate < 3210 else 0.2], load=load)

    monkeypatch.setattr(load_module, "measure", paused_at_first)
    best, trials = find_goodput(NOWHERE, LOAD, budget_ms=50, highest=10_000, attempts=2)
    assert 3210 * 0.95 < best <= 3210
    assert set(tried.values()) == {2}
    assert len({trial.load.seed for trial in trials}) == len(trials)


def test_a_load_out_of_range_is_refused() -> None:
    with pytest.raises(BenchError, match="seconds 0; it must be above 0"):
        replace(LOAD, seconds=0)


def test_a_line_says_what_it_measured_and_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    peer = Peer(name="other", median=2.0, ratio=1.5)
    line = line_of(
        [1, 2, 3, 4, 100], id=None, workload="w", metric="m", unit="u", command="penstock bench x", peer=peer
    )
    assert (line.median, line.repetitions) == (3, 5)
    assert line.p10 < 2 < 4 < line.p90
    assert re.fullmatch(r"[0-9a-f]{40}", line.commit)
    assert "cores" in line.hardware
    results.append(line, "mine")
    results.append(replace(line, peer=None), "mine")
    assert results.read(tmp_path) == [line, replace(line, peer=None)]
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(BenchError, match=r"bad.jsonl:1 is not a measurement"):
        results.read(tmp_path)


LINE = Line(
    id="a.b", command="penstock bench foundation --only a.b", workload="w", metric="m", unit="ms", repetitions=3,
    median=5.0, p10=4.0, p90=6.0, peer=None, commit="0" * 40, dirty=False, hardware="a machine, 2 cores",
    versions={"python": "3"}, date="2026-01-01",
)  # fmt: skip
ASKED = Asked(id="a.b", issue="things", what="a thing", bar=10, direction="max", unit="ms")


def test_the_last_line_of_a_target_decides_whether_it_is_met() -> None:
    (row,) = rows_of([ASKED], [LINE])
    assert row.verdict == "met"
    (row,) = rows_of([ASKED], [LINE, replace(LINE, median=11.0)])
    assert row.verdict == "short"
    (row,) = rows_of([replace(ASKED, direction="min")], [LINE])
    assert row.verdict == "short"
    (row,) = rows_of([ASKED], [])
    assert row.verdict == "not measured"
    with pytest.raises(BenchError, match=r"answer x.y, which nobody asks"):
        rows_of([ASKED], [replace(LINE, id="x.y")])


def test_a_line_counts_only_if_it_can_be_repeated() -> None:
    here = line_of([1.0], id=None, workload="w", metric="m", unit="u", command="penstock bench tick")
    assert report.counts(replace(here, dirty=False))
    assert not report.counts(replace(here, dirty=True))
    assert not report.counts(replace(here, dirty=False, command="a notebook"))
    assert not report.counts(replace(here, dirty=False, commit="0" * 40))


def test_the_page_shows_asked_beside_measured_and_the_ratio_to_the_peer() -> None:
    other = replace(LINE, id=None, workload="load", peer=Peer(name="them", median=1.0, ratio=5.0))
    text = page(rows_of([ASKED, replace(ASKED, id="c.d", issue="later")], [LINE]), [other])
    assert "at most 10 ms" in text
    assert "5 ms (4 to 6, 3 runs) | met | `penstock bench foundation --only a.b`" in text
    assert "5.00x them" in text
    assert "a machine, 2 cores" in text
    assert "Not measured yet" in text
    assert "later" in text


def test_the_targets_are_the_ones_that_were_asked_for() -> None:
    assert {target.issue for target in read_targets()} >= {"foundation", "server", "streams", "training", "device"}
    asked = results.ROOT.parent / "shared" / "targets.toml"
    if asked.exists():
        assert report.TARGETS.read_bytes() == asked.read_bytes()


def test_every_result_that_is_kept_can_be_read() -> None:
    assert all(json.dumps(line.versions) for line in results.read())
