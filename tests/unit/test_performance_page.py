"""Measurements as data, the best peer, and docs/performance.md, which is generated from them."""

import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.acceptance.report import performance_page
from benchmarks.acceptance.report.best_peer import best_peer
from benchmarks.acceptance.report.performance_page import (
    PAGE,
    FigureTarget,
    counts,
    page,
    read_targets,
    target_rows,
    without_commit,
)
from benchmarks.acceptance.report.results import ROOT, read_results
from benchmarks.peers.servers import PEERS
from penstock.bench.measurement import Comparison, Measurement, append, make_measurement, own_command
from penstock.core.errors import BenchError

LINE = Measurement(
    id="a.b", command="python -m benchmarks.acceptance foundation --only a.b", workload="w", metric="m", unit="ms",
    repetitions=3, median=5.0, p10=4.0, p90=6.0, peer=None, commit="0" * 40, dirty=False, hardware="a machine, 2 cores",
    versions={"python": "3"}, date="2026-01-01",
)  # fmt: skip
TARGET = FigureTarget(id="a.b", issue="one-gpu", what="a thing", bar=10, direction="max", unit="ms")
RATE = replace(
    LINE, id=None, metric="answers a second", unit="requests/s", workload="cnn served by {} on one core, load"
)
RATIO = replace(
    LINE,
    id="server.cnn.closed_vs_best_peer",
    metric="ratio",
    unit="ratio",
    workload="cnn, load: answers a second, over Mosec",
    median=1.5,
    peer=Comparison(name="Mosec", median=100.0, ratio=1.6),
)


def rate(label: str, value: float) -> Measurement:
    return replace(RATE, workload=RATE.workload.format(label), median=value)


def test_the_committed_page_is_what_the_report_writes() -> None:
    measurements = [line for line in read_results() if counts(line)]
    expected = page(target_rows(read_targets(), measurements), measurements)
    assert expected == PAGE.read_text(), (
        "run python -m benchmarks.acceptance report; notes belong into benchmarks/notes"
    )


def test_a_line_says_what_it_measured_and_how_to_repeat_it(tmp_path: Path) -> None:
    peer = Comparison(name="other", median=2.0, ratio=1.5)
    line = make_measurement([1, 2, 3, 4, 100], workload="w", metric="m", unit="u", command="make x", peer=peer)
    assert (line.median, line.repetitions) == (3, 5)
    assert line.p10 < 2 < 4 < line.p90
    assert re.fullmatch(r"[0-9a-f]{40}", line.commit)
    assert "cores" in line.hardware
    append(line, tmp_path / "mine.jsonl")
    append(replace(line, peer=None), tmp_path / "mine.jsonl")
    assert read_results(tmp_path) == [line, replace(line, peer=None)]
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(BenchError, match=r"bad.jsonl:1 is not a measurement"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [
        (None, ["bench", "serve", "--record", "mine.jsonl", "--rate", "5"], "penstock bench serve --rate 5"),
        ("penstock.__main__", ["bench", "feed", "a b"], "penstock bench feed 'a b'"),
        ("benchmarks.peers.run", ["--record", "--repeat", "2"], "python -m benchmarks.peers.run --repeat 2"),
        ("benchmarks.acceptance.__main__", ["soak", "--record"], "python -m benchmarks.acceptance soak"),
    ],
)
def test_the_command_of_a_line_is_as_a_user_types_it(
    module: str | None, arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    assert own_command() == command


def test_the_last_line_of_a_target_decides_whether_it_is_met() -> None:
    (row,) = target_rows([TARGET], [LINE])
    assert row.verdict == "met"
    (row,) = target_rows([TARGET], [LINE, replace(LINE, median=11.0)])
    assert row.verdict == "short"
    (row,) = target_rows([replace(TARGET, direction="min")], [LINE])
    assert row.verdict == "short"
    (row,) = target_rows([TARGET], [])
    assert row.verdict == "not measured"
    with pytest.raises(BenchError, match=r"answer x.y, which is no target"):
        target_rows([TARGET], [replace(LINE, id="x.y")])


def test_a_line_counts_only_if_it_can_be_repeated() -> None:
    here = make_measurement([1.0], workload="w", metric="m", unit="u", command="python -m benchmarks.acceptance tick")
    assert counts(replace(here, dirty=False))
    assert not counts(replace(here, dirty=True))
    assert not counts(replace(here, dirty=False, command="a notebook"))


def test_commits_that_the_history_lacks_are_named_in_the_terminal_and_stay_on_the_page() -> None:
    lines = [LINE, replace(LINE, commit="1" * 40), LINE]
    assert without_commit(lines, frozenset({"1" * 40})) == ["0000000: not in this history; 2 measurements name it"]


def test_the_page_shows_required_beside_measured_and_the_ratio_to_the_peer() -> None:
    other = replace(LINE, id=None, workload="load", peer=Comparison(name="them", median=1.0, ratio=5.0))
    ratio = replace(other, workload="ours over theirs", unit="ratio", median=4.9)
    text = page(target_rows([TARGET, replace(TARGET, id="c.d", issue="later")], [LINE]), [LINE, other, ratio])
    command = "`python -m benchmarks.acceptance foundation --only a.b` at 0000000"
    assert "## One GPU" in text
    assert f"at most 10 ms | 5 ms (4 to 6, 3 runs) | met | a machine, 2 cores | {command} |" in text
    assert "| 5 ms (4 to 6, 3 runs); 5.00 x them |" in text
    assert "| 4.90 x them (4 to 6, 3 runs) |" in text
    assert "- Later: `c.d` (at most 10 ms)" in text


def test_a_ratio_names_the_fastest_peer_of_its_day() -> None:
    ours, mosec = rate("Penstock", 150.0), rate("Mosec", 100.0)
    alone = best_peer(RATIO, [ours, mosec, replace(rate("Ray Serve", 999.0), date="2026-01-02")])
    assert alone is not None
    assert alone.description == f"1.50 x Mosec (1 of {len(PEERS)} peers measured that day)"
    faster = best_peer(RATIO, [ours, mosec, rate("FastAPI", 120.0), rate("yardstick", 500.0)])
    assert faster is not None
    assert (faster.name, faster.ratio, faster.measured) == ("FastAPI", 150 / 120, 2)
    everyone = best_peer(RATIO, [ours, *(rate(peer.label, 90.0 + (peer.name == "mosec")) for peer in PEERS)])
    assert everyone is not None
    assert everyone.description == f"1.50 x Mosec, the fastest of {len(PEERS)} peers"
    assert best_peer(RATIO, [ours, replace(mosec, hardware="another machine")]) is None
    assert best_peer(LINE, [ours, mosec]) is None


def test_a_target_over_the_best_peer_is_met_only_over_those_measured() -> None:
    target = replace(TARGET, id=RATIO.id or "", direction="min", bar=1.2, unit="ratio")
    (row,) = target_rows([target], [rate("Penstock", 150.0), rate("Mosec", 100.0), RATIO])
    assert row.verdict == "met over Mosec"
    (row,) = target_rows([target], [rate("Penstock", 150.0), rate("FastAPI", 140.0), rate("Mosec", 100.0), RATIO])
    assert row.verdict == "short"


def test_the_targets_are_the_ones_that_are_required() -> None:
    assert {target.issue for target in read_targets()} >= {"foundation", "server", "streams", "training", "device"}
    required = ROOT.parent / "shared" / "targets.toml"
    if required.exists():
        assert performance_page.TARGETS.read_bytes() == required.read_bytes()
