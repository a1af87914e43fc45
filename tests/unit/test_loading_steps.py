"""What is said while a model is loaded, and that a network is exported once."""

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import ServeError
from penstock.core.machine.process_stat import cpu_seconds, is_running
from penstock.core.machine.version import __version__
from penstock.runtime import loading_steps
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import make_runnable
from penstock.runtime.loading_steps import LoadingSteps
from penstock.runtime.onnx import exporter_process, onnx_cache
from penstock.runtime.onnx.exporter_process import ExportFailure, run_exporter
from penstock.runtime.onnx.onnx_cache import cached_graph
from tests.support.clock import Clock
from tests.support.processes import eventually
from tests.support.serving import write_doubler
from tests.support.thorough import thorough


def test_a_step_is_reported_with_its_last_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_steps, "time", SimpleNamespace(monotonic=Clock()))
    said: list[str] = []
    progress = LoadingSteps(said.append, tmp_path)
    with progress.step("measuring batches", "digits"):
        pass
    # Too short to be worth a remark.
    with progress.step("measuring batches", "digits"):
        pass
    (kept,) = (tmp_path / "durations").iterdir()
    kept.write_text("41.7\n")
    with progress.step("measuring batches", "digits"):
        pass
    with progress.step("measuring batches", "faces"):
        pass
    again = "measuring batches (it took 42 s last time)"
    assert said == ["measuring batches", "measuring batches", again, "measuring batches"]


def test_a_step_that_fails_keeps_no_duration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), LoadingSteps(durations=tmp_path).step("exporting", "digits"):
        raise ValueError("no")
    assert list(tmp_path.rglob("*.s")) == []


@pytest.mark.parametrize("damaged", ["nonsense", ""])
def test_durations_that_cannot_be_read_are_left_out(tmp_path: Path, damaged: str) -> None:
    progress = LoadingSteps(durations=tmp_path)
    with progress.step("exporting", "digits"):
        pass
    next(tmp_path.rglob("*.s")).write_text(damaged)
    assert progress.last_time("exporting", "digits") == ""


def test_of_several_processes_one_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, exports = read_bundle(write_doubler(tmp_path)), list[Path]()
    said: list[str] = []

    def export(module: str, source: Path, file: Path, options: list[str], **_: object) -> None:
        exports.append(file)
        eventually(lambda: len(said) == 3, within_s=20)
        file.write_bytes(b"graph")

    monkeypatch.setattr(onnx_cache, "run_exporter", export)
    # A lock of a file counts for each descriptor, so that threads wait as processes do.
    threads = [
        threading.Thread(target=cached_graph, args=(files, tmp_path / "cache", [], LoadingSteps(said.append)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(exports) == 1
    assert sorted(said) == [
        "exporting the network to ONNX",
        *["waiting for another process that exports the network"] * 2,
    ]


def test_a_remembered_refusal_needs_no_lock_so_that_a_cache_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = read_bundle(write_doubler(tmp_path)), tmp_path / "cache"
    monkeypatch.setattr(onnx_cache, "run_exporter", lambda *_, **__: ExportFailure(reason="no memory"))
    with pytest.raises(ServeError, match="no memory"):
        cached_graph(files, cache, [])
    (lock,) = cache.glob("*.lock")
    refused = lock.with_name(f"{lock.stem}-{__version__}.refused")
    refused.write_text("a number is read on the host")
    lock.unlink()
    with pytest.raises(ServeError, match="a number is read on the host"):
        cached_graph(files, cache, [])
    assert list(cache.glob("*.lock")) == []


@pytest.mark.parametrize("package", ["penstock", "torch", "onnx", "onnxruntime", "onnxscript"])
def test_a_remembered_refusal_is_tried_again_by_another_version(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, exports = read_bundle(write_doubler(tmp_path)), list[str]()

    def export(*_: object, **__: object) -> ExportFailure:
        exports.append("tried")
        return ExportFailure(reason="a number is read on the host", not_exportable=True)

    def tried() -> int:
        with pytest.raises(ServeError, match="a number is read on the host"):
            cached_graph(files, tmp_path / "cache", [])
        return len(exports)

    monkeypatch.setattr(onnx_cache, "run_exporter", export)
    assert [tried(), tried()] == [1, 1]
    if package == "penstock":
        monkeypatch.setattr(onnx_cache, "__version__", "99.1")
    else:
        of = onnx_cache.installed_version
        monkeypatch.setattr(onnx_cache, "installed_version", lambda name: "99.1" if name == package else of(name))
    assert [tried(), tried()] == [2, 2]


def test_a_graph_that_gives_other_answers_is_not_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, exports = write_doubler(tmp_path), list[Path]()

    def export(module: str, source: Path, file: Path, options: list[str], **_: object) -> None:
        exports.append(file)
        file.write_bytes(b"no graph of this network")

    monkeypatch.setattr(onnx_cache, "run_exporter", export)
    how = Execution(cache=tmp_path / "cache", cores=1, choice="onnx")
    for _ in range(2):
        with pytest.raises(ServeError, match="ONNX Runtime cannot run"):
            make_runnable(bundle, how, lambda _: 8)
    assert len(exports) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_long_export_is_mentioned_and_ended_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(exporter_process, "FIRST_WORD_S", 1 / 32)
    monkeypatch.setattr(exporter_process, "EXPORT_TIMEOUT_S", 0.25)
    # As much of it passes with each look.
    seconds = itertools.count(100.0, 1 / 32)
    monkeypatch.setattr(exporter_process, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    failure = run_exporter("sleeper", "the bundle", tmp_path / "graph.onnx", kept=kept)
    assert failure == ExportFailure(reason="the export took longer than 0.25 s")
    # After the first time, and after twice and four times as much.
    assert caplog.text.count("still exporting the bundle") == 3
    # A pack's graph is made anew each time.
    assert caplog.text.count("this is done once, and kept") == (3 if kept else 0)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("time.sleep(60)", "the export used no processor time for 0.8 s; mend the application, or raise"),
        # A thread that reports metrics is no progress.
        thorough(
            "threading.Thread(target=lambda: [time.sleep(0.2) for _ in range(300)]).start(); time.sleep(60)",
            "the export used no processor time for 0.8 s",
        ),
        thorough("while time.process_time() < 2: pass\nsys.exit('computed')", "computed"),
    ],
)
def test_an_exporter_that_computes_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, said: str
) -> None:
    (tmp_path / "worker.py").write_text(f"import sys, threading, time\n{work}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    if said == "computed":
        # One that computes has the time for that before it is looked at, however busy the machine is.
        seen_s = [0.0]

        def computed_s(process: int) -> float:
            eventually(lambda: cpu_seconds(process) >= seen_s[-1] + 0.3 or not is_running(process), within_s=60)
            seen_s.append(seen_s[-1] + 0.3)
            return seen_s[-1]

        monkeypatch.setattr(exporter_process, "cpu_seconds", computed_s)
    start_s = time.monotonic()
    failure = run_exporter("worker", "the bundle", tmp_path / "graph.onnx", stall_s=0.8)
    assert failure is not None
    assert said in failure.reason
    assert time.monotonic() - start_s < 30


@pytest.mark.parametrize(
    ("read", "status"),
    [("pass", 0), ("raise PenstockError('it is gone')", 1), ("raise KeyError('it is gone')", 1), ("sys.exit(0)", 1)],
)
def test_a_thread_of_the_application_does_not_keep_the_exporter(tmp_path: Path, read: str, status: int) -> None:
    lines = (
        "import sys, threading, time",
        "from penstock.core.errors import PenstockError",
        "from penstock.runtime.onnx.exporter_process import exporter_main",
        "def read(given):",
        "    threading.Thread(target=time.sleep, args=(1000,)).start()",
        f"    {read}",
        "exporter_main(None, read, lambda loaded, file: file.write_text('graph'))",
    )
    command = [sys.executable, "-c", "\n".join(lines), "source", str(tmp_path / "graph")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == status
    assert "it is gone" in done.stderr or "gone" not in read
    assert (tmp_path / "graph").is_file() == (status == 0)


def test_what_is_not_exported_now_has_the_reason(tmp_path: Path) -> None:
    files = read_bundle(write_doubler(tmp_path))
    assert onnx_cache.needs_export(files.manifest, tmp_path / "cache")
    with pytest.raises(ServeError, match="not now"):
        cached_graph(files, tmp_path / "cache", [], unexported="not now")
    assert not (tmp_path / "cache").exists()


def test_an_exporter_that_cannot_be_run_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path))
    failure = run_exporter("penstock.runtime.onnx.onnx_export", tmp_path / "bundle", tmp_path / "graph.onnx")
    assert failure == ExportFailure(reason=f"{tmp_path} cannot be run (Permission denied)")
