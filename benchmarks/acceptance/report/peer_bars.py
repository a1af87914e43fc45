"""Bars of the server beside its peers, docs/assets/peers.svg, drawn from the lines of benchmarks/results."""

import re
from collections.abc import Iterable
from html import escape

from benchmarks.acceptance.report.results import ROOT
from benchmarks.peers.servers import PEERS, PENSTOCK
from penstock.bench.measurement import Measurement

PICTURE = ROOT / "docs" / "assets" / "peers.svg"
# Loads drawn as bars, with their names in the picture.
LOADS = {
    "closed loop, 64 connections": "closed loop",
    "open loop, 2048 connections": "99% answered in 50 ms",
}
UNIT = "requests/s"
_WORKLOAD = re.compile(r"(?P<model>\w+) served by (?P<server>.+) on one core, (?P<load>.+)")
_LEFT, _WIDTH, _ROW, _HEAD = 250, 700, 22, 64


def peer_bars(measurements: Iterable[Measurement]) -> str:
    """Draw the rates of each network and load: those of the last day on which Penstock was measured, the fastest first.

    Args:
        measurements: Every line that counts, in the order in which they were recorded.
    """
    groups = _groups(list(measurements))
    lines, top = [], _HEAD
    for title, rates in groups.items():
        highest = max(rates.values())
        peers = f"{len(rates) - 1} of {len(PEERS)} peers"
        lines.append(f'<text x="20" y="{top}" font-weight="bold">{escape(title)}, {peers}</text>')
        for server, rate in sorted(rates.items(), key=lambda entry: -entry[1]):
            top += _ROW
            colour = "#00897b" if server == PENSTOCK.label else "#90a4ae"
            width = rate / highest * (_WIDTH - _LEFT - 100)
            lines += [
                f'<text x="{_LEFT - 10}" y="{top}" text-anchor="end">{escape(server)}</text>',
                f'<rect x="{_LEFT}" y="{top - 12}" width="{width:.1f}" height="15" fill="{colour}"/>',
                f'<text x="{_LEFT + width + 8:.1f}" y="{top}">{rate:,.0f}</text>',
            ]
        top += 2 * _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        'font-family="sans-serif" font-size="13" fill="#455a64">'
    )
    caption = '<text x="20" y="26" font-size="15">Requests a second on one core, larger is better</text>'
    return "\n".join([head, caption, *lines, "</svg>", ""])


def _groups(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    """The rates by title and server."""
    groups: dict[str, dict[str, float]] = {}
    labels = {PENSTOCK.label, *(peer.label for peer in PEERS)}
    found = [(line, _WORKLOAD.fullmatch(line.workload)) for line in measurements if line.unit == UNIT]
    known = [(line, match) for line, match in found if match and match["load"] in LOADS and match["server"] in labels]
    days = {(match["model"], match["load"]): line for line, match in known if match["server"] == PENSTOCK.label}
    for line, match in known:
        ours = days.get((match["model"], match["load"]))
        if ours is not None and (ours.date[:10], ours.hardware) == (line.date[:10], line.hardware):
            title = f"{match['model'].upper()}, {LOADS[match['load']]} ({ours.hardware}, {ours.date[:10]})"
            groups.setdefault(title, {})[match["server"]] = line.median
    return groups
