"""A server in rough conditions: hung up, without memory, with examples on which its network raises."""

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from penstock.core.bundles.bundle import read_bundle, write_bundle
from tests.support.processes import Crowd
from tests.support.serving import RunningServer, serve_command, write_doubler

pytestmark = pytest.mark.thorough

LIMIT_BYTES = 600 << 20


@pytest.fixture(name="bundle", scope="module")
def bundle_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture(name="ignored")
def ignored_() -> Iterator[None]:
    """SIGHUP is ignored, as below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_a_server_that_is_hung_up_drains(bundle: Path, frontends: str) -> None:
    with RunningServer(bundle, "--frontends", frontends) as server:
        processes = [server.process.pid, *worker_pids(server.process.pid).values()]
        with Crowd(server, clients=4) as crowd:
            crowd.until_right(20)
            # As when all of a control group gets it.
            for process in processes:
                # On a busy machine the drain may be over before it is the last one's turn.
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGHUP)
            assert server.process.wait(20) == 0
        assert crowd.outcomes["right"] >= 20
        assert crowd.outcomes.keys() <= {"right", "closed", "not accepted"}, crowd.outcomes
        assert server.log() == ""


@pytest.mark.usefixtures("ignored")
def test_a_server_below_nohup_goes_on(bundle: Path) -> None:
    command = ["nohup", *serve_command(bundle, "--frontends", "0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert "Serving" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("frontends", ["0", "1"])
def test_an_example_on_which_the_network_raises_refuses_the_bundle(
    bundle: Path, tmp_path: Path, frontends: str
) -> None:
    files = read_bundle(bundle)
    inputs = np.array(files.golden.inputs)
    inputs[0, 0] = 13
    golden = replace(files.golden, inputs=inputs)
    write_bundle(tmp_path / "b", files.manifest, files.weights.read_bytes(), golden)
    options = ("--frontends", frontends, "--cache", str(tmp_path), "--app", str(bundle.with_name("app.py")))
    command = serve_command(tmp_path / "b", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "thirteen" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_limit_of_memory_below_what_is_needed_ends_the_start_with_its_cause(bundle: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))

    # A process of its own, and no fork of one that has torch already.
    command = serve_command(bundle, "--frontends", "1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=limited)
    assert done.returncode != 0
    assert "Serving" not in done.stdout
    assert done.stderr.splitlines()[-1]
