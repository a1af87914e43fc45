"""A model directory: models are loaded, replaced under load and let go by request, in one process and in several."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from penstock.core.bundles.bundle import read_manifest
from tests.support.processes import Crowd, eventually, kill, mapped_tables, tables_of
from tests.support.serving import RunningServer, serve_command, write_doubler

RAW = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
ONE = np.array([1, 2, 3, 4], np.float32).tobytes()
REPLACED = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"), sleep_s=0.005)


@pytest.fixture
def models(tmp_path: Path, bundle: Path) -> Path:
    for name in ("first", "second"):
        shutil.copytree(bundle, tmp_path / name / "1")
    return tmp_path


@pytest.fixture(params=["0", "2"])
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[RunningServer]:
    with RunningServer(None, "--models", str(models), "--frontends", request.param, "--max-batch", "1") as server:
        yield server


def change(server: RunningServer, name: str, what: str) -> tuple[int, str]:
    status, _, content = server.ask("POST", f"/v2/repository/models/{name}/{what}", b"{}")
    return status, content["error"] if status != 200 else ""


def index(server: RunningServer) -> dict[str, tuple[str, str]]:
    return {
        each["name"]: (each["version"], each["state"]) for each in server.ask("POST", "/v2/repository/index", b"")[2]
    }


def ask(server: RunningServer, name: str) -> int:
    return server.ask("POST", f"/v1/apps/{name}", ONE, RAW)[0]


@pytest.mark.thorough
def test_models_are_loaded_replaced_and_unloaded(server: RunningServer, models: Path) -> None:
    assert index(server) == {"first": ("1", "READY"), "second": ("1", "READY")}
    shutil.copytree(models / "first" / "1", models / "third" / "7")
    assert change(server, "third", "load") == (200, "")
    assert (ask(server, "third"), index(server)["third"]) == (200, ("7", "READY"))
    assert change(server, "third", "unload") == (200, "")
    assert (ask(server, "third"), index(server)["third"]) == (404, ("7", "UNAVAILABLE"))
    assert change(server, "third", "unload")[0] == 404
    assert change(server, "fourth", "load")[0] == 404
    assert change(server, "third", "load") == (200, "")
    assert ask(server, "third") == 200
    # A version that is none leaves the one before it.
    (models / "third" / "8").mkdir()
    status, error = change(server, "third", "load")
    assert (status, "third" in error) == (400, True)
    assert (ask(server, "third"), index(server)["third"]) == (200, ("7", "READY"))

    with Crowd(server, clients=3, path="/v1/apps/first") as crowd:
        crowd.until_right(20)
        for number in range(2, 2 + REPLACED):
            shutil.copytree(models / "first" / "1", models / "first" / str(number))
            assert change(server, "first", "load") == (200, "")
            assert index(server)["first"] == (str(number), "READY")
            crowd.until_right(20, since_s=time.monotonic())
    assert crowd.outcomes.keys() == {"right"}
    # No table of what was replaced is left in any process.
    for process in worker_pids(server.process.pid).values():
        eventually(lambda process=process: mapped_tables(process) == 3, within_s=10)
    if worker_pids(server.process.pid):
        eventually(lambda: tables_of([server.process.pid]) == 3, within_s=10)


@pytest.mark.drill
@pytest.mark.parametrize("frontends", ["0", "2"])
def test_a_model_under_overload_leaves_the_other_its_latency(tmp_path: Path, frontends: str) -> None:
    # 30 requests of 15 ms wait for 450 ms, on any machine more than the budget.
    (tmp_path / "doubler").mkdir()
    bundle, models = write_doubler(tmp_path / "doubler", sleep_s=0.015), tmp_path / "models"
    for name in ("first", "second"):
        shutil.copytree(bundle, models / name / "1")
    options = ("--models", str(models), "--frontends", frontends, "--max-batch", "1", "--latency-ms", "200")
    with (
        RunningServer(None, *options) as server,
        Crowd(server, clients=30, path="/v1/apps/first", pause_s=0.0) as much,
        Crowd(server, clients=2, path="/v1/apps/second", pause_s=0.02) as little,
    ):
        little.until_right(100, since_s=time.monotonic() + 0.5, within_s=30)
    assert much.outcomes["refused"] > 0
    assert much.outcomes["right"] > 0
    assert little.outcomes["right"] > 0.95 * little.outcomes.total()
    waited_s = sorted(event.ended_s - event.sent_s for event in little.events if event.outcome == "right")
    assert waited_s[int(0.9 * len(waited_s))] < 0.2
    assert not {"wrong", "closed", "hung"} & {*much.outcomes, *little.outcomes}


@pytest.mark.slow
def test_every_model_comes_back_with_the_engine(models: Path, bundle: Path) -> None:
    with RunningServer(None, "--models", str(models), "--frontends", "2") as server:
        kill(server, "engine")
        # In whatever state the engine is, a change is done or refused, and what is asked for in the end holds.
        shutil.copytree(bundle, models / "third" / "1")
        eventually(lambda: change(server, "third", "load")[0] == 200, within_s=60)
        kill(server, "engine")
        kill(server, "front-end 0")
        eventually(lambda: change(server, "second", "unload")[0] == 200, within_s=60)
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
        assert [ask(server, name) for name in ("first", "second", "third")] == [200, 404, 200]
        assert index(server) == {"first": ("1", "READY"), "second": ("1", "UNAVAILABLE"), "third": ("1", "READY")}


@pytest.mark.slow
def test_a_model_whose_bodies_are_larger_than_grpc_takes_is_named_once_in_the_log(models: Path, tmp_path: Path) -> None:
    larger = tmp_path / "larger.app"
    larger.mkdir()
    write_doubler(larger)
    source = (larger / "app.py").read_text().replace("1 << 20", "1 << 22")
    (larger / "app.py").write_text(source)
    options = ("--grpc-port", "0", "--frontends", "2", "--accept-changed-app")
    with RunningServer(None, "--models", str(models), *options) as server:
        shutil.copytree(larger / "bundle", models / "third" / "1")
        assert change(server, "third", "load") == (200, "")
        assert change(server, "second", "load") == (200, "")
        # Not killed: its front-ends write their logs first.
        server.process.terminate()
        log = server.process.communicate()[1]
    assert (
        log.count("third takes bodies of up to 4194304 bytes, but gRPC messages are limited to the 1048576 bytes") == 1
    )
    assert "second takes" not in log


@pytest.mark.thorough
@pytest.mark.parametrize("frontends", ["0", "2"])
def test_several_versions_are_served_and_requests_choose(
    models: Path, tmp_path_factory: pytest.TempPathFactory, frontends: str
) -> None:
    other = write_doubler(tmp_path_factory.mktemp("other"), sleep_s=0.001)
    shutil.copytree(other, models / "first" / "3")
    hashes = {number: read_manifest(models / "first" / number).content_hash for number in "13"}
    options = ("--models", str(models), "--versions", "first=all", "--frontends", frontends, "--grpc-port", "0")
    with RunningServer(None, *options) as server:
        body = json.dumps({"inputs": [{"name": "numbers", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
        for path, version in (("", "3"), ("/versions/1", "1"), ("/versions/3", "3")):
            status, _, answer = server.ask("POST", f"/v2/models/first{path}/infer", body.encode())
            assert (status, answer["model_version"]) == (200, version)
        status, _, refused = server.ask("POST", "/v2/models/first/versions/2/infer", body.encode())
        assert (status, refused["error"]) == (404, "Model 'first' is served in version 1, 3, not 2.")
        assert server.ask("GET", "/v2/models/first")[2]["versions"] == ["1", "3"]
        apps = {each["name"]: each for each in server.ask("GET", "/v1/apps")[2]["apps"]}
        assert len(apps) == 2
        assert apps["first"]["bundle"] == hashes["3"]
        assert ask(server, "first") == 200
        stats = server.ask("GET", "/v1/stats")[2]["models"]
        assert set(stats) == {"first/1", "first/3", "second"}
        metrics = server.ask("GET", "/metrics")[2].decode()
        assert 'app="first/1"' in metrics
        assert 'app="first"' not in metrics
        states = server.ask("POST", "/v2/repository/index", b"")[2]
        assert {(each["name"], each["version"]) for each in states} == {("first", "1"), ("first", "3"), ("second", "1")}
        # The newest one goes: requests without a version get the one before.
        shutil.rmtree(models / "first" / "3")
        assert change(server, "first", "load") == (200, "")
        # It goes when its last request is answered.
        eventually(lambda: server.ask("GET", "/v2/models/first")[2]["versions"] == ["1"], within_s=10)
        assert ask(server, "first") == 200


def test_a_version_that_is_not_there_ends_the_start(models: Path) -> None:
    command = serve_command(None, "--models", str(models), "--versions", "second=4")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "penstock: Of model 'second', version 4 is not there; there is 1."


@pytest.mark.thorough
def test_a_directory_at_a_url_is_served_and_loaded_from_by_request(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache, bare = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("bare")
    shutil.rmtree(models / "second")
    options = ("--models", f"file://{models}", "--frontends", "0", "--max-batch", "1", "--cache", str(cache))
    with RunningServer(None, *options) as server:
        assert index(server) == {"first": ("1", "READY")}
        assert ask(server, "first") == 200
        assert len([each for each in (cache / "bundles").iterdir() if not each.name.startswith(".")]) == 1
        # The same content has the same place in the cache.
        shutil.copytree(models / "first" / "1", models / "third" / "7")
        assert change(server, "third", "load") == (200, "")
        assert (ask(server, "third"), index(server)["third"]) == (200, ("7", "READY"))
        shutil.copytree(models / "first" / "1", models / "broken" / "1")
        (models / "broken" / "1" / "manifest.json").write_bytes(b"{")
        status, said = change(server, "broken", "load")
        assert (status, "Model 'broken' cannot be loaded: file://" in said) == (400, True), said
        assert change(server, "nobody", "load")[0] == 404
        shutil.rmtree(models / "first")
        status, said = change(server, "first", "load")
        assert (status, "no folder 'first'" in said) == (404, True)
        # What is served does not need the URL.
        assert ask(server, "first") == 200
    command = serve_command(None, "--models", f"file://{bare}", "--frontends", "0")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "holds no models" in ended.stderr) == (2, True), ended.stderr
