"""A server whose network is split over two devices of one engine: its answers, its processes, and their deaths."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Bundle, load
from penstock.bench.process_usage import worker_pids
from penstock.core.source_files.find_application import find_application
from tests.support.processes import eventually, exists
from tests.support.serving import RunningServer, serve_command, write_doubler

pytestmark = pytest.mark.thorough

PATH, JSON = "/v1/apps/wide", {"Content-Type": "application/json"}
WIDE = """
from penstock import Application, TensorSpec


def network():
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 128))
            self.out = nn.Linear(128, 64)

        def forward(self, x):
            if (x == 13).any():
                raise ValueError("thirteen")
            y = self.body(x)
            if (x == 14).any():
                raise ValueError("fourteen")
            return torch.softmax(self.out(y), -1) * 100

    return Wide()


app = Application(
    name="wide",
    input=TensorSpec(dtype="float32", shape=(64,), meaning="numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(64,), meaning="shares", name="shares"),
    model=":network",
)
"""
DEVICES = ("--device", "cpu+cpu")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "wide_app.py").write_text(WIDE)
    found = find_application(str(folder / "wide_app.py"))
    examples = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    Bundle.write(found, found.model(), examples, to=folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def running(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle, *DEVICES) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    eventually(lambda: running.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
    return running


def ask(server: RunningServer, rows: Any) -> Any:
    status, _, reply = server.ask("POST", PATH, json.dumps({"inputs": np.asarray(rows).tolist()}).encode(), JSON)
    return status, np.array(reply["outputs"]) if status == 200 else reply["error"]


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def helpers(server: RunningServer) -> list[int]:
    return children(worker_pids(server.process.pid)["engine"])


def test_a_split_network_gives_the_answers_of_the_whole_one(server: RunningServer, bundle: Path) -> None:
    predictor = load(bundle)
    rng = np.random.default_rng(1)
    for rows in (1, 2, 7, 40):
        given = rng.standard_normal((rows, 64)).astype(np.float32)
        status, shares = ask(server, given)
        assert status == 200
        np.testing.assert_allclose(shares, predictor.predict(given), rtol=1e-4, atol=1e-4)
    engine = server.ask("GET", "/v1/stats")[2]["models"]["wide"]["engines"][0]
    # The layers are 99% of the weights, of which each process has half.
    assert engine["runs_by"] == "torch in fp32, split over cpu+cpu: 0.2 of 0.4 MB of weights each"
    assert engine["device"] == "cpu+cpu"
    assert len(helpers(server)) == 1


def test_a_row_on_which_the_network_raises_fails_alone_and_the_processes_stay_in_step(server: RunningServer) -> None:
    process = helpers(server)
    good = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    outcomes: list[int] = []

    def send(value: float) -> None:
        rows = good.copy()
        rows[1, 5] = value
        outcomes.append(ask(server, rows)[0])

    # Before the first exchange, and between two.
    threads = [threading.Thread(target=send, args=(value,)) for value in (13.0, 0.5, 14.0, 13.0, 14.0, 0.25) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [200] * 6 + [500] * 12
    assert ask(server, good)[0] == 200
    assert helpers(server) == process


def test_the_death_of_a_process_ends_its_engine_which_is_started_again(server: RunningServer) -> None:
    before, engine = helpers(server), worker_pids(server.process.pid)["engine"]
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: not exists(engine), within_s=5)
    # A front-end may not know yet that the engine is gone.
    eventually(lambda: ask(server, np.zeros((2, 64)))[0] == 200, within_s=60)
    assert server.ask("GET", "/v2/health/ready")[0] == 200
    assert helpers(server) != before


@pytest.mark.slow
def test_a_version_that_is_replaced_ends_its_processes(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "models" / "wide" / "1")
    with RunningServer(None, "--models", str(tmp_path / "models"), *DEVICES) as server:
        before = helpers(server)
        shutil.copytree(bundle, tmp_path / "models" / "wide" / "2")
        assert server.ask("POST", "/v2/repository/models/wide/load")[0] == 200
        eventually(lambda: len(helpers(server)) == 1 and helpers(server) != before, within_s=10)
        assert not exists(before[0])
        assert ask(server, np.zeros((2, 64)))[0] == 200


@pytest.mark.slow
def test_of_two_split_engines_one_answers_what_the_other_had(bundle: Path) -> None:
    with RunningServer(bundle, "--device", "cpu+cpu,cpu+cpu") as server:
        pids = worker_pids(server.process.pid)
        names = sorted(name for name in pids if name.startswith("engine"))
        assert names == ["engine 0 on cpu+cpu", "engine 1 on cpu+cpu"]
        # A stopped helper lets its engine wait in the middle of a batch.
        (helper,) = children(pids[names[0]])
        os.kill(helper, signal.SIGSTOP)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, server, np.zeros((1, 64))) for _ in range(4)]
            eventually(lambda: any(future.done() for future in asked), within_s=5)
            time.sleep(0.2)
            assert not all(future.done() for future in asked)
            os.kill(helper, signal.SIGKILL)
            assert [future.result()[0] for future in asked] == [200] * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["engine", "supervisor", "drain"])
def test_no_process_outlives_its_engine(bundle: Path, how: str) -> None:
    with RunningServer(bundle, *DEVICES) as server:
        engine, others = worker_pids(server.process.pid)["engine"], helpers(server)
        assert others
        if how == "engine":
            os.kill(engine, signal.SIGKILL)
        elif how == "supervisor":
            server.process.kill()
        else:
            server.stop()
            assert server.process.wait(10) == 0
        eventually(lambda: not any(map(exists, [engine, *others])), within_s=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--device", "cpu+cpu+cpu"), "no linear layer whose outputs can be divided by 3; serve it on one device."),
        (("--device", "cpu+cpu", "--executor", "onnx"), "would be run by ONNX Runtime, which splits no network"),
        (("--device", "cpu+cpu", "--precision", "bf16"), "a CPU serves fp32 alone"),
        (
            (
                "--device",
                "cpu+cuda:0",
            ),
            "--device is 'cpu+cuda:0'; it must be auto, cpu",
        ),
        (
            (
                "--device",
                "cuda:0+cuda:0",
            ),
            "names a GPU twice for one engine",
        ),
        (("--device", "cpu+cpu", "--frontends", "0"), "each of the 2 devices of --device has a process of its own"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(bundle: Path, options: tuple[str, ...], sentence: str) -> None:
    done = subprocess.run(serve_command(bundle, *options), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_network_without_a_large_layer_is_refused(tmp_path: Path) -> None:
    command = serve_command(write_doubler(tmp_path), *DEVICES)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "has no linear layer whose outputs can be divided by 2" in done.stderr.splitlines()[-1]
