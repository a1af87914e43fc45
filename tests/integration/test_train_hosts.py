"""Two machines, as two network namespaces joined by a cable: the training of one, one of them killed, and gone on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 240
PORT = 29_517
# Each of some twenty processes imports torch: seconds of a core for each.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S)]

APPLICATION = '''"""A small network for trying several machines."""

import os
import time

import numpy as np
import torch
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.step.optimizers import LAMB
from penstock.train.placement import Placement
from penstock.train.recipe import (
    ArraySet, CheckpointPolicy, Data, EMASettings, Parallel, Selection, StepExecution,
)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 8)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return Data(train=ArraySet(inputs=x[:120], targets=y[:120]), validation=ArraySet(inputs=x[120:], targets=y[120:]))


def slowed(x, y, generator):
    # So that there is time to disturb it.
    time.sleep(0.05 * os.path.exists(os.path.join(os.path.dirname(__file__), "slow")))
    return x, y


app = Application(
    name="machines",
    input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="two logits", name="logits"),
    model=lambda: nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 2)
    ),
    recipe=Recipe(
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda weights: LAMB(weights, lr=0.02),
        augment=slowed,
        batch_size=30,
        steps=60,
        selection=Selection(every_epochs=2),
        checkpoints=CheckpointPolicy(every_steps=20),
        execution=StepExecution(threads=1),
        ema=EMASettings(decay=0.9),
        parallel=Parallel(
            batch_norm="synchronized",
            placements={
                "0": Placement(kind="fully-sharded"),
            "3": Placement(kind="column-parallel"),
            "5": Placement(kind="row-parallel"),
            },
        ),
    ),
)
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine.

    Args:
        namespace: Of its network.
        address: Its own, in the network of both.
    """

    namespace: str
    address: str

    def start(self, *command: object, **named: Any) -> "subprocess.Popen[str]":
        """Run something there."""
        inside = ["ip", "netns", "exec", self.namespace, *map(str, command)]
        return subprocess.Popen(inside, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **named)

    def pids(self) -> list[int]:
        """All that runs there."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.fixture(scope="module")
def hosts() -> Generator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("two machines are network namespaces, and there is no command 'ip' (iproute2) to make them")
    if os.geteuid() != 0:
        pytest.skip("two machines are network namespaces, which only root may make")
    names = [f"penstock-{os.getpid()}-{side}" for side in "ab"]
    one, other = (Host(namespace=name, address=f"198.18.0.{at}") for at, name in enumerate(names, 1))
    made: list[Host] = []
    try:
        try:
            for host in (one, other):
                ip("netns", "add", host.namespace)
                made.append(host)
            # Interfaces of other names, as machines may have.
            ip("-n", one.namespace, "link", "add", "lan0", "type", "veth", "peer", "cable0", "netns", other.namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made and joined here: {error.stderr.strip()}")
        for host, interface in ((one, "lan0"), (other, "cable0")):
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", interface)
            for name in ("lo", interface):
                ip("-n", host.namespace, "link", "set", name, "up")
        yield one, other
    finally:
        for host in made:
            for pid in host.pids():
                os.kill(pid, signal.SIGKILL)
            ip("netns", "del", host.namespace)


def torchrun(hosts: Sequence[Host], *arguments: object) -> list["subprocess.Popen[str]"]:
    """The command of docs/how-to/train-on-several-gpus.md, on each machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "MASTER_"))}
    return [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2),
            *("--node-rank", rank, "--master-addr", hosts[0].address, "--master-port", PORT),
            *("-m", "penstock", "train", *arguments),
            env=own,
        )
        for rank, host in enumerate(hosts)
    ]


def ended(processes: Sequence["subprocess.Popen[str]"]) -> list[tuple[str, str]]:
    try:
        return [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train_loss"], line["validation_loss"]) for line in lines]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(APPLICATION)
    return file


@pytest.fixture(scope="module")
def one_host(app: Path) -> Path:
    run = app.parent / "one"
    command = [sys.executable, "-m", "penstock", "train", str(app), "--out", str(run), "--processes", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def killed(app: Path, hosts: tuple[Host, Host]) -> Path:
    """A run of which all that ran on the second machine was killed."""
    run, slow = app.parent / "two", app.parent / "slow"
    slow.touch()
    processes = torchrun(hosts, app, "--out", run)
    deadline_s = time.monotonic() + LIMIT_S
    while not list(run.glob("checkpoints/step-*")):
        if time.monotonic() > deadline_s:
            pytest.fail("they do not find each other, or take no steps")
        if any(process.poll() is not None for process in processes):
            pytest.fail(f"they ended too early: {ended(processes)}")
        time.sleep(0.05)
    for pid in hosts[1].pids():
        os.kill(pid, signal.SIGKILL)
    (_, said), _ = ended(processes)
    slow.unlink()
    assert processes[0].returncode == 1
    assert processes[1].returncode == -signal.SIGKILL
    sentence = (
        rf"penstock: rank [01] of 4 waited in .* for the other processes, which did not arrive \(.*{hosts[1].address}"
    )
    assert re.search(sentence, said), said
    assert f"Go on with: penstock train --resume {run}" in said
    return run


def test_one_machine_killed_ends_the_run_which_goes_on_as_that_of_one_machine(
    one_host: Path, killed: Path, hosts: tuple[Host, Host]
) -> None:
    processes = torchrun(hosts, "--resume", killed)
    said = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert "Training on 4 processes, each on the CPU, in fp32." in " ".join(said[0][0].split())
    assert "Bundle:" not in said[1][0]
    expected, found = losses(one_host), losses(killed)
    assert len(expected) >= 5
    assert [line[0] for line in found] == [line[0] for line in expected]
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert expected[-1][1] < 0.9 * expected[0][1]
