"""Which executor a server takes, and what it says when it cannot take the fast one."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import ServeError
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor, StepInput
from penstock.runtime.executor_choice import make_runnable
from penstock.runtime.onnx.onnx_cache import cached_graph
from penstock.serve.settings import ExecutionSettings
from tests.support.serving import RunningServer, write_doubler

PLAIN = """
from torch import nn
from penstock import Application, TensorSpec

app = Application(
    name="linear",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="three scores", name="scores"),
    model=lambda: nn.Linear(4, 3),
)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network that can be exported."""
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    folder = tmp_path_factory.mktemp("linear")
    (folder / "app.py").write_text(PLAIN)
    found = find_application(str(folder / "app.py"))
    examples = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    return Bundle.write(found, found.model(), examples, to=folder / "bundle").folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def made(bundle: Path, cache: Path, choice: str = "auto") -> Executor:
    executor = make_runnable(bundle, Execution(cache=cache, cores=1, choice=choice), lambda _: 8).executor
    assert isinstance(executor, Executor)
    return executor


def on_a_cpu(bundle: Path, cache: Path) -> str:
    """What `penstock inspect` says of serving on a CPU."""
    command = ["inspect", str(bundle), "--cache", str(cache), "--format", "json"]
    return json.loads(CliRunner().invoke(build(), command, catch_exceptions=False).stdout)["on_a_cpu"]


def outputs(executor: Executor, rows: int) -> np.ndarray:
    chunk_B = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
    ones = np.ones(rows, np.int64)
    return executor.step(StepInput(slots_B=np.arange(rows), chunk_B=chunk_B, length_B=ones, fresh_B=ones > 0)).output_B


def test_the_graph_is_exported_once_and_answers_as_torch_does(bundle: Path, cache: Path) -> None:
    from penstock.runtime.onnx.onnx_executor import OnnxExecutor

    assert on_a_cpu(bundle, cache / "empty").startswith("not known yet")
    first = made(bundle, cache)
    assert on_a_cpu(bundle, cache) == "ONNX Runtime"
    (graph,) = cache.glob("*.onnx")
    written_ns = graph.stat().st_mtime_ns
    second = made(bundle, cache, "onnx")
    assert isinstance(first, OnnxExecutor)
    assert isinstance(second, OnnxExecutor)
    assert graph.stat().st_mtime_ns == written_ns
    torch = made(bundle, cache, "torch")
    for rows in (1, 2, 7, 64):
        np.testing.assert_allclose(outputs(second, rows), outputs(torch, rows), atol=1e-5)


@pytest.mark.thorough
def test_a_graph_that_is_damaged_is_made_anew(bundle: Path, cache: Path) -> None:
    made(bundle, cache)
    (graph,) = cache.glob("*.onnx")
    graph.write_bytes(graph.read_bytes()[:100])
    left = cache / f".{graph.stem}-dead.onnx"
    left.write_text("the part of an export that was killed")
    np.testing.assert_allclose(outputs(made(bundle, cache), 3), outputs(made(bundle, cache, "torch"), 3), atol=1e-5)
    assert graph.stat().st_size > 100
    assert not left.exists()


def test_a_network_that_cannot_be_exported_is_run_by_torch_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.runtime.torch_executor import TorchExecutor

    bundle, cache = write_doubler(tmp_path), tmp_path / "cache"
    with caplog.at_level(logging.WARNING):
        assert isinstance(made(bundle, cache), TorchExecutor)
    assert "torch runs doubler, often slower, because ONNX Runtime cannot: " in caplog.text
    (refused,) = cache.glob("*.refused")
    assert refused.read_text() in caplog.text
    assert f"torch, often slower, because ONNX Runtime cannot: {refused.read_text()}" == on_a_cpu(bundle, cache)
    # Remembered, so that the next start does not try again.
    refused.write_text("as it was")
    with pytest.raises(ServeError, match="as it was"):
        made(bundle, cache, "onnx")


def test_a_cache_that_cannot_be_written_is_said(bundle: Path, tmp_path: Path) -> None:
    from penstock.core.bundles.bundle import read_bundle

    place = tmp_path / "file"
    place.touch()
    with pytest.raises(ServeError, match="--cache"):
        cached_graph(read_bundle(bundle), place / "below", [])


def test_another_choice_is_refused() -> None:
    with pytest.raises(ServeError, match="auto, onnx or torch"):
        ExecutionSettings(executor="tensorrt")


@pytest.mark.thorough
def test_a_server_says_which_network_runs_slower_than_it_could(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--executor", "auto", "--cache", str(tmp_path / "cache")) as server:
        (engine,) = server.ask("GET", "/v1/stats")[2]["models"]["doubler"]["engines"]
        assert engine["runs_by"] == "torch"
        assert engine["fallback"].startswith("torch runs doubler, often slower, because ONNX Runtime cannot: ")
        assert engine["fallback"].endswith("Mend that, or accept it with --executor torch.")
        server.stop()
        assert server.process.wait(20) == 0
        assert server.process.stdout is not None
        assert f"Note: {engine['fallback']}" in server.process.stdout.read()


@pytest.mark.thorough
def test_a_server_has_nothing_to_say_of_a_network_that_runs_as_fast_as_it_can(bundle: Path, cache: Path) -> None:
    with RunningServer(bundle, "--executor", "auto", "--cache", str(cache)) as server:
        (engine,) = server.ask("GET", "/v1/stats")[2]["models"]["linear"]["engines"]
        assert (engine["runs_by"], engine["fallback"]) == ("ONNX Runtime", "")
