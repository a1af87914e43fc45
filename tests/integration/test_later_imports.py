"""An application that passes its trial, and ends or delays the process that imports it later: others are served."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from tests.integration.test_loads_isolated import change
from tests.support.processes import Crowd, eventually, kill
from tests.support.serving import APPLICATION, RunningServer, write_doubler

pytestmark = pytest.mark.thorough

# Counts the imports by anybody but the test, and acts from one of them on.
COUNTED = """
import os, sys, time
if "pytest" not in sys.modules:
    with open({counts!r}, "a") as file:
        file.write("x")
        file.flush()
        if file.tell() >= int(open({counts!r} + ".from").read()):
            {line}
"""
TIMEOUT_S = 20.0
NEVER = 1 << 30


@final
class Fatal:
    """A server of a model `first`, and of one whose imports are counted."""

    def __init__(self, folder: Path, line: str) -> None:
        self._counts = folder / "counts"
        self.from_import(NEVER)
        models, sources = folder / "models", folder / "sources"
        shutil.copytree(write_doubler(folder), models / "first")
        sources.mkdir()
        counted = COUNTED.format(counts=str(self._counts), line=line)
        self.reference = str(sources / "app.py")
        (sources / "app.py").write_text(counted + APPLICATION.format(sleep_s=0.0, holds=""))
        found = find_application(self.reference)
        Bundle.write(found, found.model(), np.arange(8, dtype=np.float32).reshape(2, 4), to=models / "fatal")
        options = ["--load-timeout-s", f"{TIMEOUT_S:g}", "--cache", str(folder / "cache"), "--frontends", "2"]
        self.server = RunningServer(None, "--models", str(models), "--on-demand", *options)
        assert change(self.server, "first", "load") == (200, "")

    def from_import(self, number: int) -> None:
        """Act from this import on."""
        Path(f"{self._counts}.from").write_text(str(number))

    @property
    def imports(self) -> int:
        return len(self._counts.read_bytes()) if self._counts.exists() else 0

    def state(self) -> dict[str, Any]:
        states = self.server.ask("POST", "/v2/repository/index", b"{}")[2]
        return next(state for state in states if state["name"] == "fatal")


@pytest.fixture
def fatal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fatal]:
    made = Fatal(tmp_path, request.param)
    with made.server:
        yield made


exits = pytest.mark.parametrize("fatal", ["os._exit(3)"], indirect=True)
sleeps = pytest.mark.parametrize("fatal", ["time.sleep(1000)"], indirect=True)


@exits
@pytest.mark.slow
def test_a_load_that_ends_the_engine_names_the_application_and_is_not_repeated(fatal: Fatal) -> None:
    fatal.from_import(2)
    status, said = change(fatal.server, "fatal", "load")
    assert (status, f"(status 3) while it loaded application {fatal.reference}" in said) == (503, True), said
    with Crowd(fatal.server, clients=2, path="/v1/apps/first") as crowd:
        crowd.until_right(5, within_s=60)
        engine, imports = worker_pids(fatal.server.process.pid)["engine"], fatal.imports
        status, said = change(fatal.server, "fatal", "load")
        assert (status, f"loaded application {fatal.reference}" in said) == (400, True), said
        crowd.until_right(5, since_s=time.monotonic())
    assert worker_pids(fatal.server.process.pid)["engine"] == engine
    assert fatal.imports == imports


@exits
def test_a_load_that_ends_the_front_ends_is_refused_and_they_come_back(fatal: Fatal) -> None:
    fatal.from_import(3)
    with pytest.raises(ConnectionError):
        # Its own front-end ends.
        change(fatal.server, "fatal", "load")
    with Crowd(fatal.server, clients=2, path="/v1/apps/first", reconnect=True) as crowd:
        crowd.until_right(20, since_s=time.monotonic(), within_s=60)
    status, said = change(fatal.server, "fatal", "load")
    assert (status, f"imported application {fatal.reference}" in said) == (400, True), said


@exits
def test_a_restarted_engine_leaves_out_a_model_that_ends_it_each_time(fatal: Fatal) -> None:
    assert change(fatal.server, "fatal", "load") == (200, "")
    fatal.from_import(0)
    kill(fatal.server, "engine")
    eventually(lambda: "left out: the engine's process ended" in fatal.state()["reason"], within_s=60)
    with Crowd(fatal.server, clients=2, path="/v1/apps/first") as crowd:
        crowd.until_right(5, within_s=60)
        imports, engine = fatal.imports, worker_pids(fatal.server.process.pid)["engine"]
        # Longer than the pause between restarts.
        time.sleep(3)
        crowd.until_right(5, since_s=time.monotonic())
    assert (fatal.imports, worker_pids(fatal.server.process.pid)["engine"]) == (imports, engine)
    body, head = np.zeros(4, np.float32).tobytes(), {"Content-Type": "application/octet-stream"}
    status, headers, said = fatal.server.ask("POST", "/v1/apps/fatal", body, head)
    assert (status, fatal.reference in said["error"], int(headers["retry-after"]) > 10) == (503, True, True)
    assert fatal.server.ask("GET", "/v2/health/ready")[0] == 200


@sleeps
@pytest.mark.slow
@pytest.mark.parametrize("first", [2, 3], ids=["engine", "front-ends"])
def test_a_load_whose_import_never_ends_is_given_up_and_others_are_served(fatal: Fatal, first: int) -> None:
    fatal.from_import(first)
    start_s = time.monotonic()
    with Crowd(fatal.server, clients=2, path="/v1/apps/first") as crowd:
        status, said = change(fatal.server, "fatal", "load")
        assert (status, f"{TIMEOUT_S:g} s" in said) == (400, True), said
        assert change(fatal.server, "first", "unload") == (200, "")
        assert change(fatal.server, "first", "load") == (200, "")
        crowd.until_right(5, since_s=time.monotonic())
    assert time.monotonic() - start_s < 3 * TIMEOUT_S
