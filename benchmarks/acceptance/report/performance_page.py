"""The targets beside the last measurements: a table in the terminal, and docs/performance.md."""

import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.acceptance.report.best_peer import BestPeer, best_peer
from benchmarks.acceptance.report.peer_bars import PICTURE, peer_bars
from benchmarks.acceptance.report.results import ROOT, read_results
from penstock.bench.measurement import Measurement
from penstock.core.errors import BenchError

TARGETS = ROOT / "benchmarks" / "targets.toml"
# Hand-written prose: each file is a section of the page, in the order of the file names.
NOTES = ROOT / "benchmarks" / "notes"
PAGE = ROOT / "docs" / "performance.md"
# A measurement counts if its command begins with one of these.
REPEATABLE = ("penstock bench ", "make ", "python -m benchmarks.", "python -m tests.fuzz.")

_HEAD = """# Performance

Written by `python -m benchmarks.acceptance report`. Do not edit this page: figures come from `benchmarks/results`,
targets from `benchmarks/targets.toml`, prose from `benchmarks/notes`.

Each figure stands beside its hardware and the command that repeats it at the commit given, as it was recorded. Older
commands `penstock bench NAME` that are not there any more are `python -m benchmarks.acceptance NAME` now (`live` is
`streams`). A ratio above 1 is in our favour.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureTarget:
    """A required figure.

    Args:
        id: Its name, which measurements refer to.
        issue: Its group.
        what: Description.
        bar: The value to reach.
        direction: `"min"`: at least the bar; `"max"`: at most.
        unit: Its unit.
        aim: The value we would like to reach, or None.
    """

    id: str
    issue: str
    what: str
    bar: float
    direction: str
    unit: str
    aim: float | None = None

    @property
    def requirement(self) -> str:
        """The bar in words."""
        sign = "at least" if self.direction == "min" else "at most"
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        return " ".join([sign, f"{self.bar:g}", *_unit(self.unit)]) + aim


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRow:
    """A target and the last measurement that counts, if there is one.

    Args:
        target: The target.
        line: The measurement.
        peer: The fastest peer of its day, for a target over the best peer.
    """

    target: FigureTarget
    line: Measurement | None
    peer: BestPeer | None = None

    @property
    def verdict(self) -> str:
        """`met`, `short`, `not measured`, or `met over` a peer while others were not measured."""
        if self.line is None:
            return "not measured"
        value = self.peer.ratio if self.peer else self.line.median
        met = value >= self.target.bar if self.target.direction == "min" else value <= self.target.bar
        if not met:
            return "short"
        return "met" if self.peer is None or self.peer.is_complete else f"met over {self.peer.name}"

    @property
    def measured(self) -> str:
        """The measured value with its spread and the peer."""
        if self.line is None:
            return "-"
        return _value(self.line, self.peer)


def report(group: str | None = None) -> list[str]:
    """Print the table, write the page and its picture, and return the ids that fall short or were not measured.

    Args:
        group: Print and return only the targets of this group; the page has all.

    Raises:
        BenchError: A line or the targets cannot be read, or there is no such group.
    """
    measurements = [each for each in read_results() if counts(each)]
    rows = target_rows(read_targets(), measurements)
    groups = {row.target.issue for row in rows}
    if group is not None and group not in groups:
        raise BenchError(f"there are no targets for {group!r}; there are {sorted(groups)}.")
    chosen = [row for row in rows if group in (None, row.target.issue)]
    _print(chosen)
    # The page depends on the files alone: a rebase or a shallow clone must not change it.
    for line in without_commit(measurements, _history()):
        print(f"Warning: {line}.", file=sys.stderr)
    PAGE.write_text(page(rows, measurements))
    PICTURE.write_text(peer_bars(measurements))
    return [row.target.id for row in chosen if not row.verdict.startswith("met")]


def read_targets(file: Path = TARGETS) -> list[FigureTarget]:
    """Read all targets, in the file's order.

    Raises:
        BenchError: An entry has a field that is unknown or missing.
    """
    try:
        return [FigureTarget(**entry) for entry in tomllib.loads(file.read_text())["target"]]
    except (TypeError, KeyError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"{file} is not readable ({error}); mend it.") from None


def counts(line: Measurement) -> bool:
    """Return whether a measurement can be repeated: a command of ours, at a clean commit."""
    return not line.dirty and line.command.startswith(REPEATABLE)


def without_commit(measurements: list[Measurement], history: frozenset[str]) -> list[str]:
    """Return a line for each commit that measurements name and that the history lacks."""
    named = Counter(line.commit for line in measurements if line.commit not in history)
    return [f"{commit[:7]}: not in this history; {number} measurements name it" for commit, number in named.items()]


def target_rows(targets: list[FigureTarget], measurements: list[Measurement]) -> list[TargetRow]:
    """Match each target with the last measurement that answers it."""
    last = {line.id: line for line in measurements}
    unknown = sorted({line.id for line in measurements if line.id} - {target.id for target in targets})
    if unknown:
        raise BenchError(f"the results answer {', '.join(unknown)}, which is no target; mend the id.")
    rows: list[TargetRow] = []
    for target in targets:
        line = last.get(target.id)
        rows.append(TargetRow(target=target, line=line, peer=line and best_peer(line, measurements)))
    return rows


def page(rows: list[TargetRow], measurements: list[Measurement]) -> str:
    """Return the text of docs/performance.md."""
    groups: dict[str, list[TargetRow]] = defaultdict(list)
    for row in rows:
        groups[row.target.issue].append(row)
    measured = {group: [row for row in of_group if row.line] for group, of_group in groups.items()}
    parts = [_HEAD, *(_group_table(group, of_group) for group, of_group in measured.items() if of_group)]
    parts += _other_table([line for line in measurements if line.id is None])
    parts += [file.read_text() for file in sorted(NOTES.glob("*.md"))]
    parts += _missing(rows, groups)
    return "\n".join(parts)


def _group_table(group: str, rows: list[TargetRow]) -> str:
    lines = [
        f"## {_title(group)}",
        "",
        "| what | required | measured (median, p10 to p90) | | hardware | repeated by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    versions: set[str] = set()
    for row in rows:
        assert row.line is not None
        what = f"{row.target.what} (`{row.target.id}`)"
        lines.append(_table_line(what, row.target.requirement, row.measured, row.verdict, *_origin(row.line)))
        versions.add(_versions(row.line))
    return "\n".join([*lines, "", f"Versions: {'; '.join(sorted(versions))}.", ""])


def _other_table(lines: list[Measurement]) -> list[str]:
    last = {(line.workload, line.metric, line.hardware): line for line in lines}
    rows = [_table_line(line.workload, line.metric, _value(line), *_origin(line)) for line in last.values()]
    head = ["| workload | metric | median | hardware | repeated by |", "| --- | --- | --- | --- | --- |"]
    return ["\n".join(["## Other measurements", "", *head, *rows, ""])] if rows else []


def _missing(rows: list[TargetRow], groups: dict[str, list[TargetRow]]) -> list[str]:
    lines = [
        f"- {_title(group)}: " + ", ".join(f"`{row.target.id}` ({row.target.requirement})" for row in missing)
        for group, of_group in groups.items()
        if (missing := [row for row in of_group if row.line is None])
    ]
    head = "The targets of `benchmarks/targets.toml` without a measurement that counts:"
    return ["\n".join(["## Not measured yet", "", head, "", *lines, ""])] if lines else []


def _table_line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _origin(line: Measurement) -> tuple[str, str]:
    """Hardware and command of a measurement."""
    return line.hardware, f"`{line.command}` at {line.commit[:7]}"


def _value(line: Measurement, best: BestPeer | None = None) -> str:
    several = line.repetitions > 1
    spread = f" ({_number(line.p10)} to {_number(line.p90)}, {line.repetitions} runs)" if several else ""
    if best is not None:
        return best.description + (spread if line.peer and line.peer.name == best.name else "")
    if line.peer is None:
        return " ".join([_number(line.median), *_unit(line.unit)]) + spread
    # A ratio without its denominator says nothing.
    if line.unit == "ratio":
        return f"{line.median:.2f} x {line.peer.name}{spread}"
    return f"{_number(line.median)} {line.unit}{spread}; {line.peer.ratio:.2f} x {line.peer.name}"


def _unit(unit: str) -> list[str]:
    return [] if unit == "ratio" else [unit]


def _title(group: str) -> str:
    return re.sub(r"\bgpu", "GPU", group.replace("-", " ").capitalize(), flags=re.IGNORECASE)


def _versions(line: Measurement) -> str:
    return ", ".join(f"{name} {line.versions[name]}" for name in ("python", "torch", "numpy") if name in line.versions)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _print(rows: list[TargetRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {"short": "red", "not measured": "dim"}
    table = Table("figure", "required", "measured", "")
    for row in rows:
        colour = colours.get(row.verdict, "green")
        table.add_row(row.target.id, row.target.requirement, row.measured, f"[{colour}]{row.verdict}[/]")
    Console().print(table)


def _history() -> frozenset[str]:
    listed = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return frozenset(listed.stdout.split())
