"""`penstock score` and training on shards, from and to SeaweedFS: an object store whose identities have rights."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.acceptance.fleet.installed import NotInstalled
from tests.support.processes import eventually
from tests.support.scored import write_numbers
from tests.support.seaweedfs import BUCKET, NOBODY, READER, WRITER, SeaweedFS, seaweedfs
from tests.support.serving import write_doubler
from tests.support.sharded_app import objects, parameter_hash, started_on, trained_on, write_sharded

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
URL = f"s3://{BUCKET}"
FORBIDDEN = "check the credentials and their rights."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Generator[SeaweedFS]:
    try:
        with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as store:
            yield store
    except NotInstalled as error:
        pytest.skip(str(error))


def started(store: SeaweedFS, identity: str, bundle: Path, source: object, to: object) -> "subprocess.Popen[str]":
    by_torch = ("--executor", "torch", "--device", "cpu", "--threads", "1")
    command = [sys.executable, "-m", "penstock", "score", str(bundle), str(source), "--out", str(to), *by_torch]
    environment = os.environ | store.environment(identity)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def score(store: SeaweedFS, identity: str, bundle: Path, source: object, to: object) -> tuple[int, str, str]:
    process = started(store, identity, bundle, source, to)
    said, errors = process.communicate(timeout=240)
    return process.returncode, said, errors


@contextmanager
def killed(process: "subprocess.Popen[str]") -> Generator["subprocess.Popen[str]"]:
    """Kill a process at the end of the context, also after an error."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_checkpoint(app: Path) -> bool:
    return bool(list(app.parent.glob("remote/checkpoints/step-*")))


def put_numbers(store: SeaweedFS, folder: Path, name: str, rows: int = 40, units: int = 8) -> None:
    write_numbers(folder / "in", [rows * units], rows=rows)
    store.put((f"{name}/{file.name}", file.read_bytes()) for file in (folder / "in").iterdir())


def test_a_bucket_is_scored_into_a_bucket_also_after_a_kill(store: SeaweedFS, tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path, sleep_s=0.2)
    put_numbers(store, tmp_path, "scored/in")
    source, whole, out = f"{URL}/scored/in", f"{URL}/scored/whole", f"{URL}/scored/out"
    status, _, errors = score(store, WRITER, bundle, source, whole)
    assert (status, errors) == (0, "")
    with killed(started(store, WRITER, bundle, source, out)) as process:
        eventually(lambda: len(store.names("scored/out")) >= 2 or process.poll() is not None, within_s=120)
    left = store.read("scored/out")
    # A run that ended first would show nothing.
    assert "scored/out/_manifest.json" not in left
    status, said, errors = score(store, WRITER, bundle, source, out)
    assert (status, errors) == (0, "")
    assert f"{320 - 40 * sum(name.endswith('.parquet') for name in left)} of them new" in said
    found = {name: store.read(f"scored/{name}") for name in ("whole", "out")}
    by_name = [{name.rpartition("/")[2]: content for name, content in each.items()} for each in found.values()]
    assert by_name[0] == by_name[1]
    assert sum(name.endswith(".parquet") for name in by_name[0]) == 8


def test_a_bucket_without_rights_is_a_sentence_and_nothing_is_written(store: SeaweedFS, tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    put_numbers(store, tmp_path, "refused/in")
    source, out = f"{URL}/refused/in", f"{URL}/refused/out"
    for identity, to, says in (
        # Reads the input, and may not write.
        (READER, out, f"penstock: {out}"),
        (NOBODY, tmp_path / "out", f"penstock: {source} cannot be read"),
        (WRITER, "s3://nobodys/out", "penstock: s3://nobodys/out"),
    ):
        status, said, errors = score(store, identity, bundle, source, to)
        assert (status, said) == (2, ""), errors
        assert errors.startswith(says)
        assert FORBIDDEN in errors or "the bucket or the file is not there" in errors
        assert len(errors.splitlines()) == 1
    assert store.names("refused/out") == []
    assert not list(tmp_path.glob("out/*"))
    # What the same identity may do is done.
    status, _, errors = score(store, READER, bundle, source, tmp_path / "out")
    assert (status, errors) == (0, "")


@pytest.fixture(scope="module")
def app(store: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slow training, done from the local folder; its shards are in the bucket too."""
    app = write_sharded(tmp_path_factory.mktemp("user"), step_s=0.02)
    store.put(objects(app.parent))
    assert trained_on(app, app.parent / "shards", "local", {})[0] == 0
    return app


def test_training_on_shards_in_a_bucket_ends_with_the_hash_of_the_folder(store: SeaweedFS, app: Path) -> None:
    """By an identity that may only read, killed, and resumed on a machine with an empty disk."""
    reader = store.environment(READER)
    with killed(started_on(app, f"{URL}/shards", "remote", reader)) as process:
        eventually(lambda: has_checkpoint(app) or process.poll() is not None, within_s=120)
    assert not (app.parent / "remote" / "bundle").exists()
    again = reader | {"PENSTOCK_CACHE": str(app.parent / "another")}
    assert trained_on(app, f"{URL}/shards", "remote", again) == (0, "")
    assert parameter_hash(app, "remote") == parameter_hash(app, "local")


def test_shards_without_rights_are_a_sentence(store: SeaweedFS, app: Path) -> None:
    for identity, place, says in (
        (NOBODY, f"{URL}/shards", f"penstock: {URL}/shards/train/index.json cannot be read"),
        (WRITER, "s3://nobodys/shards", "penstock: s3://nobodys/shards/train holds no shards"),
    ):
        status, errors = trained_on(app, place, "refused", store.environment(identity))
        assert status == 2
        assert errors.startswith(says)
        assert len(errors.splitlines()) == 1
        assert (FORBIDDEN in errors) == (identity == NOBODY)
    assert not list(app.parent.glob("refused/**/*.json"))


def test_a_run_in_a_bucket_without_write_rights_is_a_sentence_before_the_training(store: SeaweedFS, app: Path) -> None:
    before = store.names()
    status, errors = trained_on(app, app.parent / "shards", "none", store.environment(READER), "--out", f"{URL}/runs/x")
    assert status == 2
    assert errors.startswith(f"penstock: {URL}/runs/x")
    assert FORBIDDEN in errors
    assert store.names() == before


def test_a_shard_that_is_replaced_while_it_is_trained_on_ends_the_run(store: SeaweedFS, tmp_path: Path) -> None:
    app = write_sharded(tmp_path)
    store.put((f"changed/{name}", content) for name, content in objects(tmp_path))
    (name, content) = next(each for each in objects(tmp_path) if each[0].endswith("train/00002.npy"))
    store.put([(f"changed/{name}", content[:-1] + b"\0")])
    status, errors = trained_on(app, f"{URL}/changed/shards", "run", store.environment(READER))
    assert status == 2
    assert f"penstock: {URL}/changed/{name} is not what index.json says" in errors
    assert not (tmp_path / "run" / "bundle").exists()
