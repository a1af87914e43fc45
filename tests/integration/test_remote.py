"""Bundles and packs in a bucket, over HTTP: pushed, pulled, loaded, served and watched."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.object_store import ObjectStore, object_store
from tests.support.packs import colour_pack
from tests.support.serving import RunningServer, write_doubler

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def store() -> Generator[ObjectStore]:
    with object_store("bucket") as store:
        yield store


@pytest.fixture(autouse=True)
def environment(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)


@pytest.mark.slow
def test_a_bundle_in_a_bucket_is_served_loaded_and_pulled(store: ObjectStore, tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    done = penstock("push", bundle, "s3://bucket/doubler")
    assert (done.returncode, done.stderr) == (0, "")
    assert store.names("bucket") == [f"doubler/{name}" for name in sorted(os.listdir(bundle))]
    with RunningServer("s3://bucket/doubler") as server:  # pyright: ignore[reportArgumentType]
        status, _, answer = server.ask("POST", "/v1/apps/doubler", b"21", {"content-type": "text/x-number"})
        assert (status, answer["doubled"]) == (200, [42.0] * 4)
        assert "Downloaded s3://bucket/doubler (" in server.log()
    done = penstock("inspect", "s3://bucket/doubler", "--run")
    # The server has downloaded it.
    assert (done.returncode, done.stderr) == (0, "")
    assert "all answers as recorded" in done.stdout
    done = penstock("pull", "s3://bucket/doubler", "--out", tmp_path / "mine")
    assert done.stdout == f"Pulled the bundle s3://bucket/doubler to {tmp_path / 'mine'}\n"
    assert {file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir()} == {
        file.name: file.read_bytes() for file in bundle.iterdir()
    }
    code = "import penstock; print(penstock.load('s3://bucket/doubler', cache='c').predict([1, 2, 3, 4]))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert loaded.stdout == "[2. 4. 6. 8.]\n"


def test_a_pack_in_a_bucket_is_watched(tmp_path: Path) -> None:
    from PIL import Image

    colour_pack(tmp_path / "pack")
    assert penstock("push", tmp_path / "pack", "s3://bucket/colours").returncode == 0
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (32, 24), "red").save(tmp_path / "pictures" / "a.png")
    done = penstock("watch", "s3://bucket/colours", "--source", tmp_path / "pictures", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert '"label": "red"' in done.stdout


def test_a_bucket_that_is_not_there_and_a_wrong_key_are_sentences(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = penstock("serve", "s3://nowhere/doubler")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "penstock: s3://nowhere/doubler holds no bundle (no manifest.json); 'penstock train' writes one to "
        "RUN/bundle.\n"
    )
    bundle = write_doubler(tmp_path)
    done = penstock("push", bundle, "s3://nowhere/doubler")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: s3://nowhere/doubler")
    assert done.stderr.count("\n") == 1
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = penstock("inspect", "s3://bucket/doubler")
    assert done.returncode == 2
    assert "Unable to locate credentials" in done.stderr
    assert done.stderr.endswith("check the credentials and their rights.\n")


def test_a_store_that_does_not_answer_is_a_sentence_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    done = penstock("inspect", "s3://bucket/doubler")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: s3://bucket/doubler/manifest.json cannot be read (EndpointConnectionErr")
    assert done.stderr.endswith("check the address and the network.\n")
