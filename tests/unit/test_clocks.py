"""A wall clock that jumps must change no deadline, timeout or schedule: only times that people read come from it."""

import ast
import re
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
# Traces (once a request) and records for people, the date of responses, the end of a certificate, the signed time of a
# pack, the creation time that Deepgram's messages have, and the end of a ticket.
# `tests/integration/test_clock_jumps.py` sets the clock of a server.
MAY_READ = {
    "bench/measurement.py",
    "export/pack_writer.py",
    "serve/control/certificate_watch.py",
    "serve/http/response_date.py",
    "serve/observe/tracing.py",
    "serve/streams/tickets.py",
    "serve/websocket/service_streams.py",
    "train/run_owner.py",
}
WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


# Most modules name none of them and need not be parsed.
NAMED = re.compile(
    "|".join([r"\bfrom\s+time\b", *(rf"\b{owner}\s*\.\s*{name}\b" for owner, name in sorted(WALL_CLOCK))])
)


def reads_wall_clock(file: Path) -> bool:
    """Tell whether a module calls, or imports by name, a function of the wall clock."""
    text = file.read_text()
    if not NAMED.search(text):
        return False
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            if pair in WALL_CLOCK:
                return True
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            return not {alias.name for alias in node.names}.isdisjoint({"time", "time_ns"})
    return False


def test_only_records_for_people_read_the_wall_clock() -> None:
    found = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if reads_wall_clock(file)}
    assert found == MAY_READ
