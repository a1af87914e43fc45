"""A server whose network takes long to export: its port is open, it says what it does, and SIGTERM ends it at once."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_processes_start import left_of
from tests.support.processes import eventually
from tests.support.serving import RunningServer, free_port, write_doubler

pytestmark = pytest.mark.thorough

NEVER_DONE = """import sys, time
    time.sleep(600 if "--end-with-input" in sys.argv else 0)
    import torch"""


def slow_bundle(folder: Path) -> Path:
    """A bundle whose network cannot be made in the process that exports it."""
    bundle = write_doubler(folder)
    app = folder / "app.py"
    app.write_text(app.read_text().replace("import torch\n", f"{NEVER_DONE}\n", 1))
    return bundle


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    answer = connection.getresponse()
    status, content = answer.status, json.loads(answer.read() or b"{}")
    connection.close()
    return status, content


def refused(answer: tuple[int, Any], begins: str) -> bool:
    """Tell whether an answer is a 503 whose sentence begins like this."""
    return answer[0] == 503 and answer[1]["error"].startswith(begins)


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("frontends", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_an_export_that_takes_long(tmp_path: Path, frontends: str) -> None:
    bundle, port = slow_bundle(tmp_path), free_port()
    durations = tmp_path / "cache" / "durations"
    durations.mkdir(parents=True)
    (durations / "doubler-exporting-the-network-to-onnx.s").write_text("330.1\n")
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), "--port", str(port), "--frontends", frontends]
    command += ["--cache", str(tmp_path / "cache"), "--accept-changed-app", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            eventually(lambda: is_open(port), within_s=30)
            assert ask(port, "GET", "/v2/health/live")[0] == 200
            step = "exporting the network to ONNX (it took 330 s last time), for "
            # Each front-end hears of a step by a message of its own, one of them later than another.
            said = f"The server is starting and loads doubler ({step}"
            eventually(lambda: refused(ask(port, "GET", "/v2/health/ready"), said), within_s=60)
            said_of_model = f"Model 'doubler' is being loaded ({step}"
            eventually(lambda: refused(ask(port, "POST", "/v1/apps/doubler", b"1"), said_of_model), within_s=20)
            assert ask(port, "POST", "/v1/apps/another", b"1")[0] == 503
            (state,) = ask(port, "POST", "/v2/repository/index")[1]
            assert (state["name"], state["state"]) == ("doubler", "LOADING")
            server.terminate()
            # The export would take ten minutes.
            assert server.wait(20) == 0
            # An export is no warning.
            assert "exporting" not in server.communicate()[1]
        finally:
            server.kill()
    # An exporter notices it once its imports are done.
    eventually(lambda: left_of(tmp_path) == [], within_s=60)


def test_what_is_announced_is_ready(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--frontends", "2", "--grpc-port", "0") as server:
        assert [server.ask("GET", "/v2/health/ready")[0] for _ in range(8)] == [200] * 8
        assert server.process.stdout is not None
        assert is_open(int(server.process.stdout.readline().rpartition(" ")[2]))


@pytest.mark.slow
def test_a_port_of_grpc_that_is_taken_during_the_start_ends_it(tmp_path: Path) -> None:
    bundle, port, grpc_port, goes_on = slow_bundle(tmp_path), free_port(), free_port(), tmp_path / "goes on"
    app = tmp_path / "app.py"
    waits = f"[time.sleep(0.1) for _ in range(600) if not os.path.exists({str(goes_on)!r})]"
    app.write_text(app.read_text().replace('time.sleep(600 if "--end-with-input" in sys.argv else 0)', waits))
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), "--port", str(port), "--frontends", "2"]
    command += ["--cache", str(tmp_path / "cache"), "--accept-changed-app", "--device", "cpu"]
    command += ["--grpc-port", str(grpc_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            eventually(lambda: is_open(port), within_s=30)
            with socket.create_server(("127.0.0.1", grpc_port)):
                goes_on.touch()
                assert server.wait(90) == 2
            said, log = server.communicate()
            assert "Serving" not in said
            assert log.strip().splitlines()[-1].startswith("penstock: ")
            assert str(grpc_port) in log.strip().splitlines()[-1]
        finally:
            server.kill()


def test_an_exporter_ends_with_its_parent(tmp_path: Path) -> None:
    bundle = slow_bundle(tmp_path)
    module = "penstock.runtime.onnx.onnx_export"
    export = f"run_exporter({module!r}, {str(bundle)!r}, Path('none.onnx'), ['--accept-changed-app'])"
    code = f"from pathlib import Path; from penstock.runtime.onnx.exporter_process import run_exporter; {export}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        # The parent and the exporter.
        eventually(lambda: len(left_of(tmp_path)) == 2, within_s=60)
        os.kill(parent.pid, signal.SIGKILL)
    # Once its imports are done.
    eventually(lambda: left_of(tmp_path) == [], within_s=60)
