"""Training on shards in a bucket, over HTTP; with identities and rights: tests/integration/test_fleet_storage.py."""

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.object_store import ObjectStore, object_store
from tests.support.processes import eventually
from tests.support.sharded_app import objects, parameter_hash, started_on, trained_on, write_sharded

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
URL = "s3://bucket/shards"


@pytest.fixture
def store() -> Generator[ObjectStore]:
    with object_store("bucket") as store:
        yield store


@pytest.fixture
def app(store: ObjectStore, tmp_path: Path) -> Path:
    app = write_sharded(tmp_path)
    for name, content in objects(tmp_path):
        store.request("PUT", f"bucket/{name}", content)
    return app


def test_a_training_on_a_bucket_ends_with_the_hash_of_one_on_the_folder(store: ObjectStore, app: Path) -> None:
    assert trained_on(app, app.parent / "shards", "local", {}) == (0, "")
    assert trained_on(app, URL, "remote", store.environment) == (0, "")
    assert parameter_hash(app, "remote") == parameter_hash(app, "local")
    kept = sorted(file.read_bytes() for file in app.parent.glob("cache/shards/*/0*.npy"))
    # Nothing but whole files.
    assert kept == sorted(content for name, content in objects(app.parent) if Path(name).name[0] == "0")
    assert not list(app.parent.glob("cache/shards/*/*.part"))


def test_what_is_wrong_with_the_bucket_is_a_sentence(store: ObjectStore, app: Path) -> None:
    status, errors = trained_on(app, "s3://nowhere/shards", "none", store.environment)
    assert status == 2
    assert errors.startswith("penstock: s3://nowhere/shards/train holds no shards (no index.json), or there is no such")
    store.request(
        "PUT", "bucket/shards/train/00001.npy", b"x" * len(dict(objects(app.parent))["shards/train/00001.npy"])
    )
    status, errors = trained_on(app, URL, "none", store.environment)
    assert status == 2
    assert f"penstock: {URL}/train/00001.npy is not what index.json says, so it changed" in errors
    assert not (app.parent / "none" / "bundle").exists()


# Its parts are in the tests above and in tests/unit/test_remote_shards.py.
@pytest.mark.slow
def test_killed_it_goes_on_exactly_with_an_empty_cache_and_by_several_processes(store: ObjectStore, app: Path) -> None:
    app = write_sharded(app.parent / "slow", step_s=0.02)
    assert trained_on(app, app.parent / "shards", "local", {}, "--processes", "2")[0] == 0
    first = started_on(app, URL, "remote", store.environment, "--processes", "2")
    eventually(
        lambda: bool(list(app.parent.glob("remote/checkpoints/step-*"))) or first.poll() is not None, within_s=60
    )
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (app.parent / "remote" / "bundle").exists()
    elsewhere = store.environment | {"PENSTOCK_CACHE": str(app.parent / "another")}
    status, errors = trained_on(app, URL, "remote", elsewhere, "--processes", "2")
    assert status == 0, errors
    assert parameter_hash(app, "remote") == parameter_hash(app, "local")
