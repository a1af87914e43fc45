"""Every fallback of docs/how-to/fallbacks.md is said, and has a test: here, or where this table names it."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.bench import compiled_program
from penstock.kernels.gru_gates import dispatch as gru_gates
from penstock.kernels.gru_layer import dispatch as gru_layer
from penstock.kernels.max_pool import dispatch as max_pool
from penstock.kernels.table_rows import dispatch as table_rows
from penstock.kernels.vocab_parallel_loss import dispatch as vocab_parallel_loss
from penstock.runtime import executor_choice
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import make_runnable
from penstock.train import run_folder
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.step import optimizer_step
from penstock.train.step.optimizer_step import OptimizerStep
from penstock.verify import browser
from tests.support.generating import SERVED, counter_bundle
from tests.support.loud import loud_bundle
from tests.support.serving import write_doubler

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "how-to" / "fallbacks.md"
HERE = "unit/test_fallbacks.py"
# The first words of each row, and its test.
TESTED = {
    "the modules of the request path": ("unit/test_compiled.py", "test_modules_that_are_not_compiled_are_counted"),
    "ONNX Runtime cannot run": (
        "integration/test_executor_choice.py",
        "test_a_server_says_which_network_runs_slower_than_it_could",
    ),
    "a live application is stepped": (HERE, "test_a_live_network_that_torch_steps_faster_is_run_by_torch"),
    "an answer takes steps, on a CPU": (HERE, "test_answers_that_take_steps_are_run_by_torch"),
    "a network on a GPU with several tensors": (
        "gpu/test_lengths.py",
        "test_a_network_that_cannot_be_captured_runs_and_the_reason_is_said",
    ),
    "a network on a GPU cannot be compiled": (
        "unit/test_compiling.py",
        "test_an_error_is_said_and_ends_the_compiling_alone",
    ),
    "a reduced precision": (
        "unit/test_gpu_choice.py",
        "test_a_precision_that_loses_too_much_is_left_out_and_refused_by_name",
    ),
    "the CUDA graphs of all lengths": (
        "gpu/test_lengths.py",
        "test_beyond_the_limit_of_memory_the_least_used_go_and_it_is_said_once",
    ),
    "one request of the greatest length": (
        "property/test_length_engine.py",
        "test_lengths_that_are_slower_than_the_budget_are_said_and_refused",
    ),
    "a model loaded later": (
        "unit/test_attachments.py",
        "test_a_large_model_attached_while_grpc_starts_is_named_in_the_log",
    ),
    "the hard limit of open files": ("unit/test_descriptors.py", "test_few_connections_are_logged"),
    "simplejpeg is not installed": (
        "integration/test_hostile_jpeg.py",
        "test_a_server_without_the_fast_decoder_says_so",
    ),
    "the cache of exported networks": (HERE, "test_a_cache_that_cannot_be_written_lets_torch_run_the_network"),
    "Triton is missing on a GPU": (HERE, "test_a_gpu_without_triton_is_said"),
    "the process from which front-ends": (
        "unit/test_fork_server.py",
        "test_a_fork_server_that_was_killed_or_hangs_is_started_anew",
    ),
    "an engine dies": ("integration/test_second_tries.py", "test_"),
    "the step cannot be captured": (HERE, "test_an_optimizer_that_no_graph_holds_is_said"),
    "there is no GPU": (HERE, "test_a_run_says_that_it_is_on_the_cpu"),
    "the weights cannot be kept": ("unit/test_master_weights.py", "test_where_there_are_no_copies_the_run_says_why"),
    "the GPUs cannot access": ("unit/test_peer_memory.py", "test_who_cannot_share_says_why"),
    "the examples cannot be given": (
        "unit/test_reader_processes.py",
        "test_examples_that_cannot_be_pickled_are_read_by_threads_and_that_is_said",
    ),
    "the newest checkpoint": (
        "unit/test_train_checkpoint.py",
        "test_a_damaged_newest_checkpoint_is_stepped_over_to_the_one_before",
    ),
    "the bucket of a run": (
        "integration/test_remote_runs.py",
        "test_a_bucket_that_vanishes_is_said_and_what_is_left_is_uploaded_by_the_same_command",
    ),
    "a GRU layer is trained": (
        "unit/test_gru_layer.py",
        "test_what_the_kernels_do_not_take_has_a_reason",
    ),
    "the peak of the GPU": ("unit/test_throughput.py", "test_an_mfu_is_of_what_is_known"),
    "matplotlib or TensorBoard": (HERE, "test_a_run_without_matplotlib_says_so"),
    "the network cannot be exported to ONNX": (
        "integration/test_trial_export.py",
        "test_a_network_that_cannot_be_exported_is_reported_with_the_reason",
    ),
    "a logger has no network": ("unit/test_callbacks.py", "test_a_logger_without_a_network_is_named_once"),
    "the 8-bit network": ("integration/test_export.py", "test_8_bits_are_measured_beside_fp32"),
    "the network of a pack": ("integration/test_export.py", "test_a_network_that_onnx_cannot_say"),
    "the host of the offline app": (
        "integration/test_device_web_versions.py",
        "test_a_page_that_is_not_isolated_uses_one_thread_and_says_the_fix",
    ),
    "there is no Chromium": (HERE, "test_verify_without_a_browser_says_why"),
    "there is no C++ compiler": (HERE, "test_a_sender_without_a_compiler_is_python_and_named"),
}


def test_every_row_of_the_page_has_a_test() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    cases = [row for row in rows if row not in ("case", "---")]
    for case in cases:
        assert [start for start in TESTED if case.startswith(start)], f"{case!r} has no test"
    for start, (file, name) in TESTED.items():
        assert [case for case in cases if case.startswith(start)], f"no row begins with {start!r}"
        assert f"def {name}" in (TESTS / file).read_text(), (file, name)


def runnable(bundle: Path, cache: Path, **options: Any) -> Any:
    return make_runnable(bundle, Execution(cache=cache, cores=1, **options), lambda _: 8)


def test_a_live_network_that_torch_steps_faster_is_run_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = loud_bundle(tmp_path)
    stepped = object()
    monkeypatch.setattr(executor_choice, "_make_onnx", lambda *_: stepped)
    for faster in ("torch", "ONNX Runtime"):
        times = {"torch": 2.0, "ONNX Runtime": 2.0} | {faster: 1.0}
        monkeypatch.setattr(executor_choice, "_trial", lambda *_, times=times: (times, "measured"))
        caplog.clear()
        with caplog.at_level("INFO"):
            made = runnable(bundle, tmp_path / "cache")
        assert (made.runs_by, made.executor is stepped) == (faster, faster != "torch")
        assert f"executor of the streams: {faster}" in caplog.text


def test_answers_that_take_steps_are_run_by_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = counter_bundle(tmp_path / "bundle", SERVED).folder
    made = runnable(bundle, tmp_path / "cache", app="tests.support.generating:SERVED")
    assert made.runs_by == "torch"
    assert "its answers take steps, which ONNX Runtime does not run here" in caplog.text


def test_a_cache_that_cannot_be_written_lets_torch_run_the_network(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = runnable(write_doubler(tmp_path), tmp_path / "file" / "below")
    assert made.runs_by == "torch"
    assert re.search(r"the cache .* cannot be used \(.*\); name another one with --cache", made.fallback)


def test_a_gpu_without_triton_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for dispatch in (gru_gates, gru_layer, max_pool, table_rows, vocab_parallel_loss, optimizer_step):
        monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    table_rows.chosen.__wrapped__("cuda", True)
    gru_gates.chosen.__wrapped__("cuda", torch.float32, False)
    vocab_parallel_loss.chosen.__wrapped__("cuda", torch.float32, False)
    gru_layer._say.__wrapped__(gru_layer.why_not((9, 0), 132, torch.bfloat16, 512, 160, 400))
    max_pool._say.__wrapped__(max_pool._why_not(torch.float32, 3, 2, backward=True))
    fix = "the package triton is not installed; pip install 'penstock-nn[gpu]'"
    assert [fix in record.message for record in caplog.records] == [True] * 5
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert any(fix in notice for notice in on_a_gpu(torch.optim.SGD).notices)


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer of the user's, which knows nothing of CUDA graphs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def on_a_gpu(make: Any, *, graph: bool = True) -> OptimizerStep:
    module = nn.Linear(4, 2)
    examples = ArraySet(inputs=np.zeros((4, 4), np.float32), targets=np.zeros(4, np.int64))
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=nn.functional.cross_entropy,
        optimizer=make,
        epochs=1,
        execution=StepExecution(graph=graph, master_weights=False),
    )
    return OptimizerStep(module, HostOptimizer(module.parameters()), recipe, World(device=torch.device("cuda")), ())


def test_an_optimizer_that_no_graph_holds_is_said() -> None:
    said = "one CUDA graph: the optimizer HostOptimizer reads its learning rate on the host."
    assert [notice.endswith(said) for notice in on_a_gpu(HostOptimizer).notices][:1] == [True]
    # Nobody wants it.
    assert not [notice for notice in on_a_gpu(HostOptimizer, graph=False).notices if notice.endswith(said)]


def fitted(**options: Any) -> None:
    inputs = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    penstock.fit(nn.Linear(4, 2), (inputs, (inputs[:, 0] > 0).astype(np.int64)), epochs=1, **options)


def test_a_run_says_that_it_is_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(device="cpu")
    assert capsys.readouterr().out.startswith("Training on the CPU, in fp32.\n")


def test_a_run_without_matplotlib_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_folder, "find_spec", lambda name: None)
    fitted(out=tmp_path / "run", quiet=True)
    assert "no curves.png; pip install 'penstock-nn[train]'" in caplog.text
    assert not (tmp_path / "run" / "curves.png").exists()


def test_verify_without_a_browser_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "find_spec", lambda name: None)
    pack: Any = type("Pack", (), {"files": ("web/index.html",), "live": None})
    assert browser.browser_obstacle(pack) == "playwright is not installed"


def test_a_sender_without_a_compiler_is_python_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_program, "find_compiler", lambda: None)
    assert compiled_program.checked_kind("auto") == "python"
    with pytest.raises(penstock.PenstockError, match=r"needs one of .*; install g\+\+, or choose python"):
        compiled_program.checked_kind("compiled")
