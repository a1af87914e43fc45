"""The files of `deploy/` against the server: every option and metric that they name must exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli import build
from tests.support.serving import RunningServer, write_doubler

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "penstock.service"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())


def settings() -> dict[str, list[str]]:
    """Every setting of the unit file, with continued lines joined."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def exec_start() -> list[str]:
    (command,) = settings()["ExecStart"]
    return shlex.split(command)


def queries() -> list[str]:
    """Every query of the dashboard, those that fill its variables included."""
    variables = [entry["query"]["query"] for entry in DASHBOARD["templating"]["list"] if entry["type"] == "query"]
    return [*variables, *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, str]]]:
    """Name and labels of every metric of a server after one request."""
    with RunningServer(write_doubler(tmp_path_factory.mktemp("deploy"))) as server:
        assert server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[0] == 200
        text = server.ask("GET", "/metrics")[2].decode()
    return [(s.name, s.labels) for family in text_string_to_metric_families(text) for s in family.samples]


def test_the_options_of_the_unit_are_in_the_help() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--help"]
    # In a narrow terminal long names are cut.
    wide = os.environ | {"COLUMNS": "200"}
    shown = subprocess.run(command, env=wide, capture_output=True, text=True, timeout=60, check=True).stdout
    options = [word for word in exec_start() if word.startswith("--")]
    assert "--drain-timeout-s" in options
    assert [option for option in options if not re.search(rf"{option}\b", shown)] == []


def test_the_command_of_the_unit_is_read_as_it_is_meant() -> None:
    program, command, *arguments = exec_start()
    assert (Path(program).name, command) == ("penstock", "serve")
    serve: Any = typer.main.get_command(build())
    parsed = serve.commands["serve"].make_context("serve", arguments).params
    assert parsed["host"] == "127.0.0.1"
    # A drain that systemd cuts short with SIGKILL would break its promise.
    (stop_s,) = settings()["TimeoutStopSec"]
    assert float(stop_s) >= parsed["drain_timeout_s"] + 5


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    # It looks whether the program exists, which it does not here.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(exec_start()[0], shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_metric_of_the_dashboard_is_exposed(samples: list[tuple[str, dict[str, str]]]) -> None:
    named = {name for query in queries() for name in re.findall(r"\bpenstock_\w+", query)}
    assert len(named) >= 10
    assert named - {name for name, _ in samples} == set()


def test_every_label_of_the_dashboard_is_exposed(samples: list[tuple[str, dict[str, str]]]) -> None:
    outcomes = {labels["outcome"] for name, labels in samples if name == "penstock_requests_total"}
    for query in queries():
        for name, selector in re.findall(r"\b(penstock_\w+)\{([^}]*)\}", query):
            labels = next(labels for exposed, labels in samples if exposed == name)
            assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector)) <= set(labels), query
        for values in re.findall(r'outcome[=!~]+"([^"]*)"', query):
            assert set(values.split("|")) <= outcomes, query
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            assert set(grouped.split(", ")) <= {"app", "outcome", "le"}, query


def test_every_query_is_of_the_chosen_application() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            metrics = re.findall(r"\bpenstock_\w+", target["expr"])
            assert metrics
            assert target["expr"].count('app=~"$app"') == len(metrics), target["expr"]


def test_panels_do_not_cover_one_another() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert cells.isdisjoint(own), panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_prometheus_scrapes_what_the_unit_serves() -> None:
    text = (DEPLOY / "prometheus.yml").read_text()
    assert "metrics_path: /metrics" in text
    port = exec_start()[exec_start().index("--port") + 1]
    assert f"- localhost:{port}" in text
