"""Loads that never end, or end the process that imports their application: others are loaded and served meanwhile."""

import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from safetensors.numpy import save

from penstock.bench.process_usage import worker_pids
from penstock.core.bundles.bundle import GOLDEN, MANIFEST, read_bundle, write_bundle
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from tests.support.processes import Crowd, eventually, kill
from tests.support.serving import APPLICATION, RunningServer, serve_command, write_doubler

pytestmark = pytest.mark.thorough

# Runs where the application is imported by anybody but the test that writes the bundle.
ELSEWHERE = "import os, sys, time\nif 'pytest' not in sys.modules:\n    {}\n"
TIMEOUT_S = 40.0
EXAMPLES = np.arange(8, dtype=np.float32).reshape(2, 4)


def write_model(models: Path, name: str, line: str) -> None:
    """Write a model whose application runs a line when it is imported."""
    sources = models.parent / f"{name}-app"
    sources.mkdir()
    (sources / "app.py").write_text(ELSEWHERE.format(line) + APPLICATION.format(sleep_s=0.0, holds=""))
    found = find_application(str(sources / "app.py"))
    Bundle.write(found, found.model(), EXAMPLES, to=models / name)


@pytest.fixture(name="models", scope="module")
def models_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isolated")
    bundle, models = write_doubler(folder), folder / "models"
    for name in ("first", "second", "pipe", "device", "tensor"):
        shutil.copytree(bundle, models / name)
    for name in ("pipe", "device"):
        (models / name / GOLDEN).unlink()
    os.mkfifo(models / "pipe" / GOLDEN)
    (models / "device" / GOLDEN).symlink_to("/dev/zero")
    files = read_bundle(models / "tensor")
    write_bundle(files.folder, files.manifest, save({"t" * 70_000: EXAMPLES}), files.golden)
    write_model(models, "sleeps", "time.sleep(1000)")
    write_model(models, "exits", "os._exit(3)")
    write_model(models, "surrogate", r"raise ValueError('\ud800\0 bad')")
    (models / "fifo").mkdir()
    os.mkfifo(models / "fifo" / MANIFEST)
    write_model(models, "leaves", "raise SystemExit('enough')")
    return models


@pytest.fixture(name="server", params=[pytest.param("0", marks=pytest.mark.slow), "2"], scope="module")
def server_(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    options = [
        "--on-demand",
        "--load-timeout-s",
        f"{TIMEOUT_S:g}",
        "--cache",
        str(cache),
        "--frontends",
        request.param,
        "--grpc-port",
        "0",
    ]
    with RunningServer(None, "--models", str(models), *options) as server:
        assert change(server, "first", "load") == (200, "")
        yield server


def change(server: RunningServer, name: str, what: str) -> tuple[int, str]:
    """Load or unload a model, with all the time that its deadline allows."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=3 * TIMEOUT_S)
    connection.request("POST", f"/v2/repository/models/{name}/{what}", b"{}")
    answer = connection.getresponse()
    status, content = answer.status, json.loads(answer.read() or b"{}")
    connection.close()
    return status, content.get("error", "")


def engine_of(server: RunningServer) -> int:
    return worker_pids(server.process.pid).get("engine", server.process.pid)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("pipe", "golden.safetensors cannot be read (it is no regular file)", marks=pytest.mark.slow),
        pytest.param("device", "golden.safetensors cannot be read (it is no regular file)", marks=pytest.mark.slow),
        pytest.param("tensor", "t" * 100, marks=pytest.mark.slow),
        # No UTF-8 encodes it.
        ("surrogate", "ValueError: \\ud800\0 bad"),
        ("exits", "ended the process that imported it (status 3)"),
        pytest.param("leaves", "SystemExit: enough", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_and_ends_nothing(server: RunningServer, name: str, said: str) -> None:
    engine = engine_of(server)
    with Crowd(server, clients=2, path="/v1/apps/first") as crowd:
        crowd.until_right(5)
        status, error = change(server, name, "load")
        crowd.until_right(5, since_s=time.monotonic())
    assert (status, said in error) == (400, True), error[:1000]
    assert crowd.outcomes.keys() == {"right"}
    assert engine_of(server) == engine


def test_a_text_that_utf_8_cannot_encode_is_the_answer_over_grpc_too(server: RunningServer) -> None:
    assert server.process.stdout is not None
    # The second line of the announcement.
    port = server.process.stdout.readline().split()[-1]
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
    with pytest.raises(tritonclient.grpc.InferenceServerException, match=r"ValueError: \\ud800\0 bad"):
        client.load_model("surrogate", client_timeout=TIMEOUT_S)
    client.close()


def test_a_folder_whose_manifest_is_a_pipe_is_listed_as_failed_and_the_others_are_served(server: RunningServer) -> None:
    listed = {each["name"]: each for each in server.ask("POST", "/v2/repository/index", b"{}")[2]}
    assert listed["fifo"]["state"] == "UNAVAILABLE"
    assert "is no bundle and has no numbered versions" in listed["fifo"]["reason"]
    assert listed["second"]["reason"] == "loaded on first use"
    status, error = change(server, "fifo", "load")
    assert (status, "is no bundle" in error) == (404, True), error


# Runs where the application is imported by the process that exports its network.
EXPORTER = "import sys, threading, time\nif sys.argv[0].endswith('onnx_export.py'):\n    {}\n"
EXPORT_TIMEOUT_S = 10.0


@pytest.fixture(name="exporting", params=["0", "2"])
def exporting_(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Path]]:
    """A server that exports networks, of an application that sleeps in the exporter, one with a thread, and another."""
    folder = tmp_path_factory.mktemp("exporting")
    models = folder / "models"
    shutil.copytree(write_doubler(folder), models / "torch")
    for name, line in (
        ("sleeps", "time.sleep(1000)"),
        ("thread", "threading.Thread(target=time.sleep, args=(1000,)).start()"),
        ("healthy", "pass"),
    ):
        write_exported(models, name, EXPORTER.format(line))
    options = ["--on-demand", "--load-timeout-s", f"{EXPORT_TIMEOUT_S:g}", "--cache", str(folder / "cache")]
    options += ["--frontends", request.param, "--executor", "auto", "--device", "cpu"]
    with RunningServer(None, "--models", str(models), *options) as server:
        yield server, models


def write_exported(models: Path, name: str, before: str) -> None:
    sources = models.parent / f"{name}-app"
    sources.mkdir()
    # Another network each, or they would share a graph.
    text = APPLICATION.format(sleep_s=0.0, holds="").replace("torch.tensor(2.0)", f"torch.tensor({2.0 + len(name)})")
    for line in ("if (x == 19).any():", "    os._exit(19)", "if (x == 13).any():", '    raise ValueError("thirteen")'):
        text = text.replace(f"            {line}\n", "")
    text = text.replace("            hold('')\n", "").replace(
        "            time.sleep(0.0 + max(0, -float(x.min())))\n", ""
    )
    (sources / "app.py").write_text(before + text)
    found = find_application(str(sources / "app.py"))
    Bundle.write(found, found.model(), EXAMPLES, to=models / name)


@pytest.mark.slow
def test_an_export_that_never_ends_delays_no_other_load(exporting: tuple[RunningServer, Path]) -> None:
    server, models = exporting
    ended: dict[str, tuple[int, str]] = {}

    def load(name: str) -> None:
        ended[name] = change(server, name, "load")

    start_s = time.monotonic()
    waiting = threading.Thread(target=load, args=("sleeps",))
    waiting.start()

    def state() -> str:
        listed = server.ask("POST", "/v2/repository/index", b"{}")[2]
        return next(each["reason"] for each in listed if each["name"] == "sleeps")

    eventually(lambda: "exporting the network to ONNX" in state(), within_s=30)
    assert change(server, "healthy", "load") == (200, "")
    assert not ended, "the other one waited for it"
    waiting.join()
    # torch runs it, and the server says why.
    assert ended["sleeps"] == (200, "")
    assert time.monotonic() - start_s < 3 * EXPORT_TIMEOUT_S + 30
    assert change(server, "thread", "load") == (200, "")
    found = server.ask("GET", "/v1/stats")[2]["models"]
    stats = {name: each["engines"][0] for name, each in found.items()}
    assert {name: each["runs_by"] for name, each in stats.items()} == {
        "sleeps": "torch",
        "healthy": "ONNX Runtime",
        "thread": "ONNX Runtime",
    }
    assert "the export used no processor time for 10 s" in stats["sleeps"]["fallback"]
    if "engine" not in worker_pids(server.process.pid):
        return
    # The cache is lost, and then the engine: the next one gets the other models while one is exported in vain.
    for file in (models.parent / "cache").glob("*.onnx"):
        file.unlink()
    kill(server, "engine")
    body, head = EXAMPLES[0].tobytes(), {"Content-Type": "application/octet-stream"}
    eventually(lambda: server.ask("POST", "/v1/apps/sleeps", body, head)[0] == 200, within_s=90)
    for name in ("healthy", "thread"):
        eventually(lambda name=name: server.ask("POST", f"/v1/apps/{name}", body, head)[0] == 200, within_s=30)
        (engine,) = server.ask("GET", "/v1/stats")[2]["models"][name]["engines"]
        assert engine["runs_by"] == "ONNX Runtime"


@pytest.mark.slow
def test_a_load_that_never_ends_delays_no_other_one(server: RunningServer) -> None:
    sleeping: list[tuple[int, str]] = []
    waiting = threading.Thread(target=lambda: sleeping.append(change(server, "sleeps", "load")))
    start_s = time.monotonic()
    waiting.start()
    time.sleep(1)
    with Crowd(server, clients=2, path="/v1/apps/first") as crowd:
        assert change(server, "second", "load") == (200, "")
        assert change(server, "second", "unload") == (200, "")
        assert not sleeping, "the others waited for it"
        waiting.join()
        crowd.until_right(5, since_s=time.monotonic())
    assert sleeping[0][0] == 400
    assert "importing its application took longer than 40 s" in sleeping[0][1]
    assert time.monotonic() - start_s < 2 * TIMEOUT_S
    assert crowd.outcomes.keys() == {"right"}


@pytest.mark.slow
def test_a_request_demands_a_model_that_ends_its_process_and_others_go_on(server: RunningServer) -> None:
    body, head = EXAMPLES[0].tobytes(), {"Content-Type": "application/octet-stream"}
    engine = engine_of(server)
    assert server.ask("POST", "/v1/apps/exits", body, head)[0] in (503, 404)
    assert server.ask("POST", "/v1/apps/first", body, head)[0] == 200
    assert engine_of(server) == engine


@pytest.mark.slow
def test_an_engine_killed_while_long_messages_are_under_way_is_restarted(server: RunningServer) -> None:
    if "engine" not in worker_pids(server.process.pid):
        pytest.skip("one process")
    loading = [threading.Thread(target=change, args=(server, "tensor", "load")) for _ in range(4)]
    for thread in loading:
        thread.start()
    kill(server, "engine")
    for thread in loading:
        thread.join()
    body, head = EXAMPLES[0].tobytes(), {"Content-Type": "application/octet-stream"}
    eventually(lambda: server.ask("POST", "/v1/apps/first", body, head)[0] == 200, within_s=60)
    assert change(server, "second", "load") == (200, "")


@pytest.mark.slow
def test_a_bundle_that_ends_its_process_is_refused_at_the_start(models: Path, tmp_path: Path) -> None:
    only = tmp_path / "only"
    shutil.copytree(models / "exits", only / "exits")
    for bundle, options, said in (
        (None, ["--models", str(only)], "status 3"),
        (models / "leaves", [], "SystemExit: enough"),
        (models / "pipe", [], "no regular file"),
    ):
        command = serve_command(bundle, *options, "--cache", str(tmp_path), "--frontends", "0")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
