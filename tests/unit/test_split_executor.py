"""A split network as an executor: several tensors of varying lengths, and what is told when it cannot be made."""

import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from penstock import load
from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import ServeError
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.runnable import Runnable
from penstock.runtime.split.split_choice import split_runnable
from penstock.runtime.split.split_executor import SplitInputs
from penstock.serve.settings import ExecutionSettings, ModelSettings, Settings
from tests.support.named import bundle_of
from tests.support.warm_client import SOCKET_VARIABLE

WORDS = """
import torch
from torch import nn
from penstock import Application, Dim, TensorSpec

tokens = Dim("tokens", max=24)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.classify = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, vectors, mask):
        hidden = torch.tanh(self.mix(vectors)) * mask[..., None]
        return {"mood": self.classify(hidden.sum(1)).softmax(-1), "hidden": hidden}

app = Application(
    name="words",
    inputs={
        "vectors": TensorSpec(dtype="float32", shape=(tokens, 64), meaning="vectors"),
        "mask": TensorSpec(dtype="float32", shape=(tokens,), meaning="1 where there is a word"),
    },
    outputs={
        "mood": TensorSpec(dtype="float32", shape=(3,), meaning="mood"),
        "hidden": TensorSpec(dtype="float32", shape=(tokens, 64), meaning="hidden"),
    },
    model=Net,
)
"""


def words(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    return {
        "vectors": rng.standard_normal((length, 64)).astype(np.float32),
        "mask": rng.integers(0, 2, length).astype(np.float32),
    }


@pytest.fixture(autouse=True)
def inheriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a Python each time: the forks of the tests inherit no descriptors."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_of(WORDS, tmp_path_factory.mktemp("words"), [words(3), words(24)])


def split(bundle: Path, device: str = "cpu+cpu", **how: Any) -> Runnable:
    files = read_bundle(bundle)
    return split_runnable(
        files, bundle_application(files, None), Execution(cache=bundle, cores=2, device=device, **how)
    )


def children() -> list[int]:
    found = Path("/proc/self/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


@pytest.mark.thorough
def test_records_of_varying_lengths_are_answered_as_by_the_whole_network(bundle: Path) -> None:
    before = children()
    runnable, predictor = split(bundle), load(bundle)
    executor = runnable.executor
    assert isinstance(executor, Executor)
    try:
        assert len(children()) == len(before) + 1
        given = [words(length) for length in (1, 24, 7, 7)]
        spec = predictor.application.input
        chunks = spec.of_many(given)  # pyright: ignore[reportAttributeAccessIssue]
        for found, whole in zip(executor.predict(chunks), predictor.predict(given), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            named = predictor.application.output.unpack(found)  # pyright: ignore[reportAttributeAccessIssue]
            for name, array in whole.items():
                np.testing.assert_allclose(named[name], array, atol=1e-5)
    finally:
        executor.close()
    assert children() == before


@pytest.mark.thorough
def test_a_device_without_memory_is_named_and_no_process_is_left(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))

    def full(*given: object) -> NoReturn:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(GpuNetwork, "to", full)
    with pytest.raises(ServeError, match=r"^cpu has too little memory for its slice of the network; take more devices"):
        split(bundle)
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_process_that_cannot_load_says_why(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    # The application's file is another one by the time at which the helper reads it.
    source = bundle.parent / "app.py"
    text = source.read_text()
    original = SplitInputs.__init__

    def changed(self: SplitInputs, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        source.write_text(text + "\n# changed\n")

    monkeypatch.setattr(SplitInputs, "__init__", changed)
    try:
        with pytest.raises(ServeError, match=r"^on cpu: app\.py of application 'words' changed"):
            split(bundle)
    finally:
        source.write_text(text)
    assert children() == before


@pytest.mark.parametrize(
    ("device", "devices", "processes"),
    [("cpu", 1, False), ("cpu,cpu", 2, True), ("cuda:0+cuda:1", 1, True), ("cuda:0+cuda:1,cuda:2+cuda:3", 2, True)],
)
def test_devices_are_joined_by_plus_and_engines_separated_by_commas(device: str, devices: int, processes: bool) -> None:
    execution = ExecutionSettings(device=device)
    assert (len(execution.devices), execution.has_processes) == (devices, processes)
    assert (
        not processes
        or Settings(models=ModelSettings(bundles=(Path("bundle"),)), execution=execution).frontend_processes > 0
    )


@pytest.mark.parametrize("device", ["cpu+cuda:0", "cuda+cuda:1", "cuda:0+cuda:0", "cpu+", "auto+cpu", "cuda:0+auto"])
def test_devices_that_do_not_go_together_are_refused(device: str) -> None:
    with pytest.raises(ServeError, match="--device is "):
        ExecutionSettings(device=device)
