"""Bundles and packs at URLs: downloaded once, whole or not at all, refused when they are others."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from penstock.core.bundles.bundle import MANIFEST, WEIGHTS, read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import ApplicationError, BundleCorrupt, BundleError, PackCorrupt, PackError, StorageError
from penstock.core.packs.pack import SIGNATURE, read_pack
from penstock.core.packs.signature import new_key, sign
from penstock.core.remote import remote_copy
from penstock.core.remote.remote_copy import (
    BUNDLE,
    PACK,
    download_folder,
    kind_of,
    local_bundle,
    local_pack,
    upload_folder,
    written_to,
)
from penstock.core.storage import remote_folder
from penstock.core.storage.remote_folder import RemoteFolder, url_of
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from penstock.runtime.load import load
from tests.support.packs import colour_pack
from tests.support.small import examples, small, write_app, written

URL = "memory://bucket/models/small"


@pytest.fixture(autouse=True)
def memory() -> Generator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def remote(tmp_path: Path) -> RemoteFolder:
    written(tmp_path / "b")
    remote = RemoteFolder(URL)
    upload_folder(BUNDLE, tmp_path / "b", remote)
    return remote


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("s3://bucket/x/", "s3://bucket/x"),
        (Path("s3://bucket/x"), "s3://bucket/x"),
        (Path("file:///srv/x"), "file:///srv/x"),
        ("hf://user/name@v1", "hf://user/name@v1"),
        ("runs/iris", None),
        ("app.py:app", None),
        (Path("C:/x"), None),
        (None, None),
    ],
)
def test_a_url_is_told_from_a_path(place: object, url: str | None) -> None:
    assert url_of(place) == url


def test_a_bundle_is_downloaded_once_and_loaded(tmp_path: Path, remote: RemoteFolder, memory: Any) -> None:
    said: list[str] = []
    folder = local_bundle(remote.url, tmp_path / "cache", said.append)
    assert read_bundle(folder).manifest == read_bundle(tmp_path / "b").manifest
    assert said[0].startswith(f"Downloaded {URL} (")
    # Only the manifest is read again.
    memory.rm_file("/bucket/models/small/" + WEIGHTS)
    assert local_bundle(remote.url, tmp_path / "cache", said.append) == folder
    assert len(said) == 1
    predicted = load(URL, cache=tmp_path / "cache", app=small()).predict(examples())
    assert (predicted == load(tmp_path / "b", app=small()).predict(examples())).all()


def test_another_bundle_at_the_same_url_is_another_download(tmp_path: Path, remote: RemoteFolder) -> None:
    first = local_bundle(URL, tmp_path / "cache")
    written(tmp_path / "other", seed=1)
    upload_folder(BUNDLE, tmp_path / "other", remote)
    second = local_bundle(URL, tmp_path / "cache")
    assert first != second
    assert read_bundle(first).manifest.content_hash != read_bundle(second).manifest.content_hash


def test_two_at_once_download_once(tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    plain = RemoteFolder.download

    def counted(self: RemoteFolder, name: str, file: Path) -> None:
        downloads.append(name)
        plain(self, name, file)

    monkeypatch.setattr(RemoteFolder, "download", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(local_bundle(URL, tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert sorted(downloads) == sorted({*downloads})


def test_a_download_that_breaks_off_is_never_read(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RemoteFolder, name: str, file: Path) -> None:
        file.write_bytes(b"half")
        raise StorageError("the bucket vanished.")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "download", broken)
        with pytest.raises(StorageError, match="vanished"):
            local_bundle(URL, tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache" / "bundles").iterdir() if entry.is_dir()] == []
    read_bundle(local_bundle(URL, tmp_path / "cache"))


def test_what_was_damaged_in_the_cache_is_downloaded_again(tmp_path: Path, remote: RemoteFolder) -> None:
    folder = local_bundle(URL, tmp_path / "cache")
    (folder / WEIGHTS).write_bytes(b"x")
    read_bundle(local_bundle(URL, tmp_path / "cache"))


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_file_that_is_cut_short_or_altered_at_the_url_is_refused(
    tmp_path: Path, remote: RemoteFolder, damage: Any
) -> None:
    remote.write(WEIGHTS, damage(remote.read(WEIGHTS)))
    with pytest.raises(BundleCorrupt, match=f"^{URL}/{WEIGHTS} is not the file that was written"):
        local_bundle(URL, tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache" / "bundles").iterdir() if entry.is_dir()] == []


def test_a_file_that_is_missing_at_the_url_is_refused(tmp_path: Path, remote: RemoteFolder) -> None:
    remote.delete(WEIGHTS)
    with pytest.raises(StorageError, match=f"^{URL}/{WEIGHTS} cannot be read .* the file is not there"):
        local_bundle(URL, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\\b", ""])
def test_a_manifest_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    remote = RemoteFolder(URL)
    remote.write(MANIFEST, json.dumps({"files": {name: "0" * 64}}).encode())
    with pytest.raises(BundleCorrupt, match="names the file"):
        local_bundle(URL, tmp_path / "cache")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b'{"files": 3}'])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    RemoteFolder(URL).write(MANIFEST, data)
    with pytest.raises(BundleError, match=r"holds no bundle|is not readable"):
        local_bundle(URL, tmp_path / "cache")


def test_a_fault_of_a_local_folder_is_not_put_down_to_the_network(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written \(File exists\); mend that or choose another place\.$"):
        RemoteFolder(f"file://{tmp_path}/file").write("name", b"")


def test_nothing_at_the_url_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"^memory://none holds no bundle \(no manifest.json\); 'penstock train'"):
        local_bundle("memory://none", tmp_path / "cache")
    with pytest.raises(PackError, match=r"^memory://none holds no pack \(no pack.json\); 'penstock export"):
        local_pack("memory://none", tmp_path / "cache")
    with pytest.raises(StorageError, match="is neither a bundle"):
        kind_of("memory://none")


def test_a_replaced_bundle_is_read_again_while_it_is_downloaded(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = written(tmp_path / "other", seed=1)
    plain, replaced = RemoteFolder.download, threading.Event()

    def during(self: RemoteFolder, name: str, file: Path) -> None:
        if not replaced.is_set():
            replaced.set()
            upload_folder(BUNDLE, other.folder, RemoteFolder(URL))
        plain(self, name, file)

    monkeypatch.setattr(RemoteFolder, "download", during)
    download_folder(BUNDLE, remote, tmp_path / "mine")
    assert read_bundle(tmp_path / "mine").manifest.content_hash == other.manifest.content_hash


def test_a_pack_and_its_signature_are_downloaded(tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
    remote = RemoteFolder(URL)
    upload_folder(PACK, pack.folder, remote)
    assert kind_of(URL) is PACK
    plain = local_pack(URL, tmp_path / "cache")
    assert read_pack(plain).signed_by is None
    key = tmp_path / "key.pem"
    new_key(key)
    (pack.folder / SIGNATURE).write_bytes(sign((pack.folder / PACK_DESCRIPTION).read_bytes(), key))
    upload_folder(PACK, pack.folder, remote)
    signed = local_pack(URL, tmp_path / "cache")
    assert signed != plain
    assert read_pack(signed).signed_by is not None
    remote.write("model.onnx", b"x")
    with pytest.raises(PackCorrupt, match=f"^{URL}/model.onnx is not the file"):
        local_pack(URL, tmp_path / "another-cache")
    (pack.folder / SIGNATURE).unlink()
    upload_folder(PACK, pack.folder, remote)
    assert read_pack(local_pack(URL, tmp_path / "cache")).signed_by is None


def test_what_is_no_bundle_is_not_overwritten(tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    remote.write("thesis.tex", b"x")
    written(tmp_path / "b")
    with pytest.raises(StorageError, match=r"holds 'thesis.tex' and no manifest.json"):
        upload_folder(BUNDLE, tmp_path / "b", remote)
    with pytest.raises(StorageError, match=r"holds 'thesis.tex'"), written_to(BUNDLE, URL):
        pytest.fail("the work began")
    with pytest.raises(StorageError, match="is a repository"), written_to(BUNDLE, "hf://user/name"):
        pytest.fail("the work began")


def test_the_manifest_is_written_last(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    plain = RemoteFolder.upload

    def noted(self: RemoteFolder, file: Path, name: str) -> None:
        names.append(name)
        plain(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", noted)
    with written_to(BUNDLE, URL) as folder:
        written(folder)
    assert len(names) == 3
    assert names[-1] == MANIFEST
    with written_to(BUNDLE, tmp_path / "here") as folder:
        assert folder == tmp_path / "here"


def test_a_download_does_not_replace_what_is_there(tmp_path: Path, remote: RemoteFolder) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(StorageError, match="exists already; choose another --out"):
        download_folder(BUNDLE, remote, tmp_path / "mine")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        StorageError,
        match=r"^s3://b/x needs the package s3fs, which is not installed; pip install 'penstock-nn\[remote\]'.$",
    ):
        RemoteFolder("s3://b/x")
    with pytest.raises(StorageError, match=r"^gs://b/x needs a package .*; pip install gcsfs.$"):
        RemoteFolder("gs://b/x")
    with pytest.raises(StorageError, match=r"^gopher://b/x names no storage .* hf:// or file://.$"):
        RemoteFolder("gopher://b/x")


def test_a_full_disk_is_a_sentence(tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot be kept in .*PENSTOCK_CACHE"):
        local_bundle(URL, tmp_path / "cache")


def test_a_file_system_behaves_as_an_object_store_does(tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/there")
    assert (remote.sizes(), remote.read("x")) == ({}, None)
    remote.write("a/b", b"12")
    remote.write("c", b"3")
    assert remote.sizes() == {"a/b": 2, "c": 1}
    assert remote.sizes("a") == {"a/b": 2}
    remote.delete("c")
    remote.delete("c")
    assert remote.sizes() == {"a/b": 2}
    assert remote_copy.DEFAULT_CACHE.name == "penstock"


SECRETS = [
    "s3://KEY:hunter2@bucket/x",
    "s3://KEY:hun/ter2@bucket/x",
    "S3://KEY:hunter2@bucket/x",
    "ftp://user:hunter2@host/x",
    "https://host/x?token=hunter2",
    "abfs://c@account/x?sig=hunter2",
    "simplecache::s3://KEY:hunter2@bucket/x",
]


@pytest.mark.parametrize("place", [*SECRETS, *map(Path, SECRETS)])
def test_a_url_with_credentials_is_refused_and_not_printed(place: Any) -> None:
    with pytest.raises(StorageError, match=r"credentials in the environment|chained") as caught:
        url_of(place)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["sftp://user@host:22/x", "abfs://c@account.dfs.core.windows.net/x", "hf://u/n@v1"])
def test_a_user_a_port_or_a_revision_is_no_secret(url: str) -> None:
    assert url_of(url) == url


def test_the_scheme_of_a_url_may_be_in_capitals() -> None:
    assert url_of("S3://bucket/Model") == "s3://bucket/Model"


def test_an_error_of_a_storage_has_no_signature_of_an_address(
    remote: RemoteFolder, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise OSError("403 for 'https://me:hunter2@cdn/x?X-Amz-Signature=hunter2&b=1', see the log")

    monkeypatch.setattr(type(memory), "info", refused)
    with pytest.raises(StorageError, match=r"403 for 'https://cdn/x', see the log") as caught:
        remote.read(MANIFEST)
    assert "hunter2" not in str(caught.value)


def test_a_bundle_at_a_url_brings_no_file_that_is_not_verified(tmp_path: Path, remote: RemoteFolder) -> None:
    manifest = json.loads(remote.read(MANIFEST) or b"")
    manifest["files"]["evil.py"] = "0" * 64
    remote.write(MANIFEST, json.dumps(manifest).encode())
    remote.write("evil.py", b"raise SystemExit('ran')")
    with pytest.raises(BundleCorrupt, match=r"names the file 'evil\.py'"):
        download_folder(BUNDLE, remote, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_bundle_runs_no_application_of_its_own_folder(tmp_path: Path) -> None:
    written(tmp_path / "b")
    write_app(tmp_path / "b")
    files = read_bundle(tmp_path / "b")
    for reference in (str(tmp_path / "b" / "app.py"), f"{tmp_path}/x/../b/app.py:app"):
        named = replace(files, manifest=replace(files.manifest, reference=reference))
        with pytest.raises(ApplicationError, match=r"names a file of its own, 'app.py'.*--app"):
            bundle_application(named)
        assert bundle_application(named, reference, accept_changed=True).application.name == "small"


def test_a_name_that_leads_out_is_not_downloaded(tmp_path: Path, remote: RemoteFolder) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "a\\b", "\x1b[2J"):
        with pytest.raises(StorageError, match="leads out of the folder"):
            remote.download(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_huge_description_is_not_read(remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "MAX_READ_BYTES", 10)
    with pytest.raises(StorageError, match=r"manifest.json has more than 10 bytes"):
        remote.read(MANIFEST)


def test_what_does_not_fit_on_the_disk_is_not_downloaded(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteFolder, "size", lambda self, name: 2**60 if name == WEIGHTS else 1)
    monkeypatch.setattr(remote_folder, "MAX_READ_BYTES", 2**61)
    monkeypatch.setattr(RemoteFolder, "download", lambda *given: pytest.fail("downloaded"))
    with pytest.raises(StorageError, match=r"cannot be kept in .*it has 1,152,921,504,606,8.* free"):
        local_bundle(URL, tmp_path / "cache")
    with pytest.raises(StorageError, match=r"cannot be written \(it has"):
        download_folder(BUNDLE, remote, tmp_path / "mine")


def test_a_device_or_a_pipe_in_a_folder_is_not_read(tmp_path: Path) -> None:
    written(tmp_path / "b")
    remote = RemoteFolder(f"file://{tmp_path}/b")
    (tmp_path / "b" / WEIGHTS).unlink()
    (tmp_path / "b" / WEIGHTS).symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"weights.safetensors is no file"):
        local_bundle(remote.url, tmp_path / "cache")
    with pytest.raises(BundleCorrupt, match=r"weights.safetensors cannot be read \(it is no regular file\)"):
        read_bundle(tmp_path / "b")
    (tmp_path / "b" / MANIFEST).unlink()
    (tmp_path / "b" / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"manifest.json is no file"):
        remote.read(MANIFEST)


def test_another_bundle_in_the_place_of_one_in_the_cache_is_not_used(tmp_path: Path, remote: RemoteFolder) -> None:
    place = local_bundle(URL, tmp_path / "cache")
    other = written(tmp_path / "other", seed=1)
    shutil.rmtree(place)
    shutil.copytree(other.folder, place)
    assert local_bundle(URL, tmp_path / "cache") == place
    assert read_bundle(place).manifest == read_bundle(tmp_path / "b").manifest


def test_a_bundle_that_is_replaced_while_it_is_downloaded_gets_its_own_place(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = written(tmp_path / "other", seed=1)
    first = local_bundle(URL, tmp_path / "cache-of-the-first").name
    plain, replaced = RemoteFolder.download, threading.Event()

    def during(self: RemoteFolder, name: str, file: Path) -> None:
        if not replaced.is_set():
            replaced.set()
            upload_folder(BUNDLE, other.folder, RemoteFolder(URL))
        plain(self, name, file)

    monkeypatch.setattr(RemoteFolder, "download", during)
    place = local_bundle(URL, tmp_path / "cache")
    assert place.name != first
    assert read_bundle(place).manifest == other.manifest


def test_a_disk_that_is_full_is_not_an_error_of_the_network(
    tmp_path: Path, remote: RemoteFolder, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "weights.safetensors")

    monkeypatch.setattr(type(memory), "get_file", full)
    with pytest.raises(StorageError, match=r"No space left on device.*; make room on the disk\.$"):
        local_bundle(URL, tmp_path / "cache")


# Another process downloads a bundle, and ends or stays.
OTHER = """
import sys, time
from pathlib import Path
from penstock.core.remote.remote_copy import local_bundle
print(local_bundle(sys.argv[1], Path(sys.argv[2]), limit_bytes=int(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_user(url: str, cache: Path, limit_bytes: int = 1 << 40) -> Generator[Path]:
    command = [sys.executable, "-c", OTHER, url, str(cache), str(limit_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.communicate(timeout=20)
        assert process.returncode == 0


@pytest.mark.thorough
def test_the_downloads_that_were_not_used_for_longest_go_and_those_in_use_stay(tmp_path: Path) -> None:
    urls: list[str] = []
    for number in range(4):
        written(tmp_path / f"b{number}", seed=number)
        urls.append(f"file://{tmp_path}/bucket/m{number}")
        upload_folder(BUNDLE, tmp_path / f"b{number}", RemoteFolder(urls[-1]))
    cache, places = tmp_path / "cache", list[Path]()
    for url in urls[:3]:
        with another_user(url, cache) as place:
            places.append(place)
    size = sum(file.stat().st_size for file in places[0].rglob("*"))
    # The first was used last; the second is in use.
    with another_user(urls[0], cache), another_user(urls[1], cache) as held:
        for number, place in enumerate((places[2], places[1], places[0])):
            os.utime(place.with_name(f".{place.name}.used"), (1000 + number, 1000 + number))
        os.utime(held.with_name(f".{held.name}.used"), (1, 1))
        said: list[str] = []
        mine = local_bundle(urls[3], cache, said.append, limit_bytes=3 * size)
        assert [place.exists() for place in (*places, mine)] == [True, True, False, True]
        assert said[1].startswith(f"Removed {places[2]}")
    # The others have ended: the oldest goes; this process uses its own.
    with another_user(urls[2], cache, limit_bytes=size):
        assert [place.exists() for place in (*places, mine)] == [False, False, True, True]
    # What was removed is downloaded again.
    with another_user(urls[0], cache) as again:
        assert again == places[0]
        read_bundle(again)
    assert not [each for each in (cache / "bundles").iterdir() if each.name.endswith(".removed")]
