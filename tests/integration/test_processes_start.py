"""A server of several processes that cannot start: it says why, ends with status 2, or 1
if a process crashed, and leaves nothing behind."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import eventually
from tests.support.serving import RunningServer, serve_command, write_doubler


def left_of(folder: Path) -> list[int]:
    """The processes that name a folder on their command lines."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def refused(folder: Path, bundle: Path, *options: str, status: int = 2) -> str:
    """What a server that cannot start says."""
    command = serve_command(bundle, "--frontends", "2", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status, done.stderr
    assert left_of(folder) == []
    return done.stderr


def one_sentence(said: str) -> bool:
    return said.startswith("penstock: ") and len(said.splitlines()) == 1


@pytest.mark.thorough
def test_api_keys_and_tls_files_that_are_none(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("somebody short\n")
    said = refused(tmp_path, bundle, "--api-keys", str(keys))
    assert "the key of 'somebody'" in said
    assert one_sentence(said)
    said = refused(tmp_path, bundle, "--tls-certificate", str(keys), "--tls-key", str(keys))
    assert "cannot be used" in said
    assert one_sentence(said)


def test_a_bundle_that_cannot_be_loaded(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    weights = next(bundle.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert one_sentence(refused(tmp_path, bundle))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "sentence", "status"),
    [
        ("import os; os._exit(3)", "the process of engine ended while the server started", 1),
        pytest.param(
            "raise RuntimeError('no network today')", "RuntimeError: no network today", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_a_network_that_ends_its_process_or_cannot_be_made(
    tmp_path: Path, network: str, sentence: str, status: int
) -> None:
    bundle = write_doubler(tmp_path)
    app = tmp_path / "app.py"
    app.write_text(app.read_text().replace("    return Doubler()", f"    {network}"))
    said = refused(tmp_path, bundle, "--accept-changed-app", status=status)
    assert sentence in said.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "after_s", [pytest.param(0.2, marks=pytest.mark.slow), 1.0, pytest.param(2.5, marks=pytest.mark.slow)]
)
def test_sigterm_while_it_starts(tmp_path: Path, after_s: float) -> None:
    bundle = write_doubler(tmp_path)
    command = serve_command(bundle, "--frontends", "2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: len(left_of(tmp_path)) > 1, within_s=30)
        time.sleep(after_s)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert left_of(tmp_path) == []


@pytest.mark.thorough
def test_sigterm_to_the_whole_group_drains(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--frontends", "2", "--verbose") as server:
        for process in left_of(tmp_path):
            # Those of a busy machine may end before it is their turn.
            with suppress(ProcessLookupError):
                os.kill(process, 15)
        assert server.process.wait(10) == 0
        assert server.log().count("drained; 0 requests were answered in all") == 2
