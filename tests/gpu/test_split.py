"""A network split over two GPUs: its answers, the memory of each GPU, the time of a request, a process that dies."""

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Bundle, load
from penstock.bench.process_usage import worker_pids
from penstock.core.source_files.find_application import find_application
from tests.support.processes import eventually
from tests.support.serving import RunningServer

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]

# Two pairs of layers of 2 x 2048 x 16384 weights: 537 MB in fp32.
APP = """
from penstock import Application, TensorSpec

SIZE = 2048


def network():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers += [nn.Linear(SIZE, 8 * SIZE), nn.GELU(), nn.Linear(8 * SIZE, SIZE), nn.LayerNorm(SIZE)]
    return nn.Sequential(*layers)


app = Application(
    name="wide",
    input=TensorSpec(dtype="float32", shape=(SIZE,), meaning="numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(SIZE,), meaning="numbers", name="results"),
    model=":network",
)
"""
PATH, RAW = "/v1/apps/wide", {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
REQUESTS = 200


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "wide_app.py").write_text(APP)
    found = find_application(str(folder / "wide_app.py"))
    examples = np.random.default_rng(0).standard_normal((4, 2048)).astype(np.float32)
    Bundle.write(found, found.model(), examples, to=folder / "bundle")
    return folder / "bundle"


def used_mb() -> list[float]:
    found = [torch.cuda.mem_get_info(device) for device in range(2)]
    return [(total - free) / 1e6 for free, total in found]


def ask(server: RunningServer, row: Any) -> tuple[int, np.ndarray]:
    status, _, body = server.ask("POST", PATH, row.tobytes(), RAW)
    return status, np.frombuffer(body, np.float32) if status == 200 else body


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_split_over_two_gpus(bundle: Path, precision: str) -> None:
    row = np.random.default_rng(1).standard_normal(2048).astype(np.float32)
    expected = load(bundle).predict(row)
    said: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "precision": precision}
    for devices in ("cuda:0", "cuda:0+cuda:1") if precision == "fp32" else ("cuda:0+cuda:1",):
        before = used_mb()
        options = (
            "--device",
            devices,
            "--precision",
            precision,
            "--executor",
            "auto",
            "--max-batch",
            "64",
            "--no-compile",
        )
        with RunningServer(bundle, *options) as server:
            engine = server.ask("GET", "/v1/stats")[2]["models"]["wide"]["engines"][0]
            grown = [after - had for after, had in zip(used_mb(), before, strict=True)]
            status, results = ask(server, row)
            assert status == 200
            difference = float(np.abs(results - expected).max())
            assert difference < (0.05 if precision == "bf16" else 1e-3) * float(np.abs(expected).max())
            times_ms: list[float] = []
            for _ in range(REQUESTS):
                start_s = time.perf_counter()
                assert ask(server, row)[0] == 200
                times_ms.append(1e3 * (time.perf_counter() - start_s))
            said[devices] = {
                "runs_by": engine["runs_by"],
                "costs": dict(zip(engine["costs"]["rows"], engine["costs"]["ms"], strict=True)),
                "grown_mb": [round(each) for each in grown],
                "p50_ms": round(statistics.median(times_ms), 3),
                "difference": difference,
            }
            if "+" in devices and precision == "fp32":
                said[devices]["back_s"] = _killed_helper(server)
                assert ask(server, row)[0] == 200
    print(json.dumps(said))
    assert "split over cuda:0+cuda:1" in said["cuda:0+cuda:1"]["runs_by"]


def _killed_helper(server: RunningServer) -> float:
    """Kill the process of the second GPU; returns the seconds until the server is ready again."""
    engine = worker_pids(server.process.pid)["engine"]
    found = [file.read_text().split() for file in Path(f"/proc/{engine}/task").glob("*/children")]
    (helper,) = [int(child) for children in found for child in children]
    os.kill(helper, signal.SIGKILL)
    eventually(lambda: server.ask("GET", "/v2/health/ready")[0] != 200, within_s=5)
    return eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
