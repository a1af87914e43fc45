"""Bundles and packs in repositories of a local hub: pushed as one commit with a card, served, pulled, refused."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from penstock.core.bundles.bundle import read_bundle
from penstock.core.remote.hub_push import CARD, MARK
from tests.support.hub import TOKEN, Hub, hub
from tests.support.packs import colour_pack
from tests.support.serving import RunningServer, write_doubler

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with hub() as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        # Its protocol of chunks needs a store of chunks.
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        yield there


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)


def test_a_bundle_is_one_commit_with_a_card_and_is_served_and_pulled(there: Hub, tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    done = penstock("push", bundle, "hf://user/doubler")
    assert done.returncode == 0, done.stderr
    repository = there.repositories["user/doubler"]
    assert len(repository.commits) == 2
    commit, files = list(repository.commits.items())[-1]
    assert done.stdout == f"Pushed the bundle {bundle} to hf://user/doubler, commit {commit}\n"
    assert {name: data for name, data in files.items() if name != CARD} == {
        file.name: file.read_bytes() for file in bundle.iterdir()
    }
    card = files[CARD].decode()
    assert "library_name: penstock" in card
    assert "| input `numbers` | float32[4], four numbers |" in card
    assert "| output `doubles` | float32[4], their doubles |" in card
    assert f"| content hash | {read_bundle(bundle).manifest.content_hash} |" in card
    assert "penstock serve hf://user/doubler" in card
    with RunningServer(f"hf://user/doubler@{commit}") as server:  # pyright: ignore[reportArgumentType]
        status, _, answer = server.ask("POST", "/v1/apps/doubler", b"21", {"content-type": "text/x-number"})
        assert (status, answer["doubled"]) == (200, [42.0] * 4)
    done = penstock("pull", "hf://user/doubler", "--out", tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    assert read_bundle(tmp_path / "mine").manifest == read_bundle(bundle).manifest
    # A card of the user's own stays; a damaged file is refused.
    repository.commits["1" * 40] = files | {CARD: b"mine", "weights.safetensors": files["weights.safetensors"][:-1]}
    done = penstock("pull", "hf://user/doubler", "--out", tmp_path / "damaged")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: hf://user/doubler/weights.safetensors is not the file that was written")
    assert not (tmp_path / "damaged").exists()
    assert penstock("push", bundle, "hf://user/doubler").returncode == 0
    files = repository.files("main") or {}
    assert files[CARD] == b"mine"
    assert files["weights.safetensors"] == (bundle / "weights.safetensors").read_bytes()


def test_a_pack_is_pushed_and_not_into_the_repository_of_a_bundle(there: Hub, tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
    assert penstock("push", pack.folder, "hf://user/colours", "--private").returncode == 0
    repository = there.repositories["user/colours"]
    assert repository.private
    assert MARK in (repository.files("main") or {})[CARD].decode()
    bundle = write_doubler(tmp_path)
    done = penstock("push", bundle, "hf://user/colours")
    assert (done.returncode, len(repository.commits)) == (2, 2)
    assert done.stderr == "penstock: hf://user/colours holds a pack; push the bundle to another repository.\n"


def test_without_rights_it_is_one_sentence(there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = colour_pack(tmp_path / "pack")
    assert penstock("push", pack.folder, "hf://user/colours", "--private").returncode == 0
    done = penstock("push", pack.folder, "hf://somebody/colours")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: hf://somebody/colours cannot be written (")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for command in (("push", pack.folder, "hf://user/colours"), ("pull", "hf://user/colours", "--out", "x")):
        done = penstock(*command)
        assert done.returncode == 2
        assert done.stderr.startswith("penstock: hf://user/colours cannot be ")
        assert done.stderr.endswith("log in with 'hf auth login', or set HF_TOKEN to a token that may do this.\n")
        assert done.stderr.count("\n") == 1
