"""Training into a bucket, over HTTP: killed and gone on with from an empty disk, and buckets that fail."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.train.resume import APPLICATION
from tests.support.object_store import ObjectStore, object_store
from tests.support.processes import eventually
from tests.support.serving import RunningServer

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]
STEPS = 300
# A step takes 10 ms, so that there is time to kill the run.
SLOW = APPLICATION.replace("import numpy as np", "import time\n\nimport numpy as np").replace(
    "augment=lambda x, y, generator: (x", "augment=lambda x, y, generator: (time.sleep(0.01), x)[1:] and (x"
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectStore]:
    with object_store("bucket") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def app(tmp_path: Path) -> Path:
    assert "time.sleep" in SLOW
    (tmp_path / "app.py").write_text(SLOW)
    return tmp_path / "app.py"


def started(app: Path, out: str | Path, machine: str, *more: str) -> subprocess.Popen[str]:
    """A training on a machine, which has a cache of its own."""
    command = [sys.executable, "-m", "penstock", "train", str(app), "--out", str(out), "--steps", str(STEPS)]
    return subprocess.Popen(
        [*command, "--checkpoint-every-steps", "20", *more],
        env=os.environ | {"PENSTOCK_CACHE": str(app.parent / machine)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(app: Path, out: str | Path, machine: str, *more: str) -> tuple[int, str, str]:
    process = started(app, out, machine, *more)
    said, errors = process.communicate(timeout=120)
    return process.returncode, said, errors


def fields(store: ObjectStore, run: str) -> dict[str, Any]:
    return json.loads(store.request("GET", f"{run}/run.json"))


def has_checkpoint(store: ObjectStore) -> bool:
    return any(name.endswith("/state.json") for name in store.names("bucket"))


# Without S3 and a kill: tests/unit/test_remote_run.py.
@pytest.mark.slow
def test_killed_it_goes_on_from_an_empty_disk_with_the_same_hash_and_is_served(store: ObjectStore, app: Path) -> None:
    status, _, errors = trained(app, app.parent / "local", "none")
    assert status == 0, errors
    url = "s3://bucket/runs/x"
    first = started(app, url, "first")
    eventually(lambda: has_checkpoint(store) or first.poll() is not None, within_s=60)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    first.communicate()
    assert fields(store, "bucket/runs/x")["state"] == "running"
    assert not [name for name in store.names("bucket") if "/bundle/" in name]
    status, said, errors = trained(app, url, "second")
    assert (status, errors) == (0, ""), errors
    assert f"Bundle: {url}/bundle" in said
    there, local = fields(store, "bucket/runs/x"), json.loads((app.parent / "local" / "run.json").read_text())
    assert there["state"] == "finished"
    assert (there["parameter_hash"], there["bundle"]) == (local["parameter_hash"], local["bundle"])
    checkpoints = {name.split("/")[3] for name in store.names("bucket") if "/checkpoints/" in name}
    assert len(checkpoints) == 2
    assert max(checkpoints) == f"step-{STEPS:08d}"
    with RunningServer(f"{url}/bundle") as server:  # pyright: ignore[reportArgumentType]
        status, _, answer = server.ask("POST", "/v1/apps/interrupted", json.dumps([0.5] * 8).encode())
        assert status == 200, answer


def test_a_bucket_that_is_not_there_is_refused_before_the_training(store: ObjectStore, app: Path) -> None:
    for more in ((), ("--processes", "2")):
        status, said, errors = trained(app, "s3://nowhere/x", "first", *more)
        assert status == 2
        assert "step" not in said
        assert errors.startswith("penstock: s3://nowhere/x")
        assert "(The specified bucket does not exist)" in errors
        assert errors.count("\n") == 1


@pytest.mark.drill
def test_a_bucket_that_vanishes_is_said_and_what_is_left_is_uploaded_by_the_same_command(
    store: ObjectStore, app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(app, "s3://bucket/x", "first")
    eventually(lambda: has_checkpoint(store) or process.poll() is not None, within_s=60)
    store.close()
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 2, said
    assert f"step {STEPS}/{STEPS}" in said
    assert errors.count("The training goes on, with its checkpoints in ") <= 1
    assert "the training is finished, and " in errors
    assert "is not uploaded to s3://bucket/x, but kept in " in errors
    with object_store("bucket") as another:
        monkeypatch.setenv("AWS_ENDPOINT_URL", another.environment["AWS_ENDPOINT_URL"])
        # A new bucket is empty: the copy is of a run that was removed there. One that comes back has what it had.
        copy = next(app.parent.glob("first/runs/*/x"))
        another.request("PUT", "bucket/x/owner.json", (copy / "owner.json").read_bytes())
        status, said, errors = trained(app, "s3://bucket/x", "first")
        assert (status, errors) == (0, "")
        assert "is finished; its bundle is s3://bucket/x/bundle" in said
        assert fields(another, "bucket/x")["state"] == "finished"
        assert "x/bundle/manifest.json" in another.names("bucket")
