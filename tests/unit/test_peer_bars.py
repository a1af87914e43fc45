"""The picture of the server beside its peers: what the script draws of the recorded lines, and nothing else."""

from dataclasses import replace
from xml.etree import ElementTree

from benchmarks.acceptance.report.peer_bars import PICTURE, peer_bars
from benchmarks.acceptance.report.performance_page import counts
from benchmarks.acceptance.report.results import read_results
from penstock.bench.measurement import Measurement, make_measurement

LINE = make_measurement([100.0], workload="cnn served by {} on one core, closed loop, 64 connections", metric="m",
                        unit="requests/s", command="make x")  # fmt: skip


def line(server: str, rate: float, date: str = "2026-01-02") -> Measurement:
    return replace(LINE, workload=LINE.workload.format(server), median=rate, date=date)


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_committed_picture_is_what_the_script_draws() -> None:
    drawn = peer_bars(each for each in read_results() if counts(each))
    assert drawn == PICTURE.read_text(), "run python -m benchmarks.acceptance report"
    assert len(drawn) < 60_000


def test_the_bars_are_those_of_the_last_day_in_their_order() -> None:
    old = line("Mosec", 900.0, "2026-01-01")
    shown = texts(peer_bars([old, line("Penstock", 100.0), line("Mosec", 200.0), line("Another", 300.0)]))
    assert shown[2:] == ["Mosec", "200", "Penstock", "100"]
    assert "2026-01-02" in shown[1]


def test_a_bar_is_as_long_as_its_rate() -> None:
    svg = ElementTree.fromstring(peer_bars([line("Penstock", 100.0), line("Mosec", 50.0)]))
    widths = [float(bar.attrib["width"]) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == 2 * widths[1]
