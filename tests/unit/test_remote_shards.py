"""Shards at URLs: the same examples as from the folder, each file downloaded once, and what is said of damage."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from penstock.core.errors import BadExample, StorageError, TrainError
from penstock.core.spec import Array
from penstock.core.storage.remote_folder import RemoteFolder
from penstock.train.data.examples import ArraySet
from penstock.train.data.loader import ReadingLoader
from penstock.train.data.remote_shards import RemoteShards
from penstock.train.data.sampler import example_seeds, training_order
from penstock.train.data.shard_file import sha256_of
from penstock.train.data.shard_writer import write_parts, write_shards
from penstock.train.data.shards import Shards
from tests.support.processes import eventually

COUNT, URL = 23, "memory://bucket/shards"
# Of five examples each.
SHARDS = [f"{index:05d}.npy" for index in range(5)]
READS = """
import sys
from penstock.core.storage.remote_folder import RemoteFolder
from penstock.train.data.shards import Shards
download, names = RemoteFolder.download, []
def counted(self, name, file):
    names.append(name)
    download(self, name, file)
RemoteFolder.download = counted
shards = Shards(sys.argv[1], cache=sys.argv[2])
shards.prefetch()
assert shards.verify() == []
print(*names)
"""
# Killed when half of a shard has arrived.
DYING = """
import os, signal, sys
from penstock.core.storage.remote_folder import RemoteFolder
from penstock.train.data.shards import Shards
shards = Shards(sys.argv[1], cache=sys.argv[2])
def half(self, name, file):
    file.write_bytes(self.system.cat_file(self.path_of(name))[:100])
    os.kill(os.getpid(), signal.SIGKILL)
RemoteFolder.download = half
shards.verify()
"""


def numbers() -> ArraySet:
    return ArraySet(inputs=np.arange(COUNT * 9, dtype=np.float32).reshape(COUNT, 9), targets=np.arange(COUNT) % 3)


def read(shards: Shards, indices: list[int]) -> tuple[Array, Any]:
    which = np.array(indices)
    inputs = shards.empty(len(which))
    return inputs, shards.read(which, example_seeds(3, np.zeros(len(which), np.int64), which), inputs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(numbers(), tmp_path / "shards", classes=("a", "b", "c"), shard_bytes=5 * 36 + 7)
    return tmp_path / "shards"


@pytest.fixture
def system(folder: Path) -> Generator[Any]:
    """A bucket with the shards."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    put(system, folder)
    yield system
    system.store.clear()


def put(system: Any, folder: Path, url: str = URL) -> None:
    for file in folder.rglob("*.*"):
        system.pipe_file(f"{url}/{file.relative_to(folder)}", file.read_bytes())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    download = RemoteFolder.download

    def counted(self: RemoteFolder, name: str, file: Path) -> None:
        names.append(name)
        download(self, name, file)

    monkeypatch.setattr(RemoteFolder, "download", counted)
    return names


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files in the cache whose SHA-256 is computed, without what was just downloaded."""
    names: list[str] = []

    def counted(file: Path) -> str:
        if not file.name.endswith(".part"):
            names.append(file.name)
        return sha256_of(file)

    monkeypatch.setattr("penstock.train.data.remote_shards.sha256_of", counted)
    return names


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.data.remote_shards.WAITS_S", (0.0, 0.0))


@pytest.mark.usefixtures("system")
def test_the_examples_and_the_fingerprint_are_those_of_the_folder(folder: Path, cache: Path) -> None:
    local, remote = Shards(folder), Shards(URL, cache=cache)
    assert remote.fingerprint() == local.fingerprint()
    assert (len(remote), remote.classes, remote.input_shape) == (COUNT, ("a", "b", "c"), (9,))
    for shards in (local, remote):
        inputs, targets = read(shards, [22, 0, 7])
        np.testing.assert_array_equal(inputs, numbers().inputs[[22, 0, 7]])
        np.testing.assert_array_equal(targets, numbers().targets[[22, 0, 7]])
    assert remote.verify() == []
    batches: list[Array] = []
    for shards in (local, remote):
        with ReadingLoader(shards, training_order(1, COUNT, 8), workers=3) as loader:
            batches.append(np.concatenate([next(loader).inputs.numpy() for _ in range(10)]))
    np.testing.assert_array_equal(batches[0], batches[1])


def test_trees_of_varying_length_are_read_too(system: Any, tmp_path: Path, cache: Path) -> None:
    words = [np.arange(n, dtype=np.int32) for n in (3, 1, 4, 1, 5)]
    write_shards(ArraySet(inputs=words, targets={"sum": np.arange(5.0)}), tmp_path / "trees", shard_bytes=20)
    put(system, tmp_path / "trees", "memory://bucket/trees")
    local, remote = Shards(tmp_path / "trees"), Shards("memory://bucket/trees", cache=cache)
    for mine, theirs in zip(read(local, [4, 0]), read(remote, [4, 0]), strict=True):
        np.testing.assert_equal(mine, theirs)


def test_each_file_is_downloaded_once_by_its_content(
    system: Any, folder: Path, cache: Path, downloads: list[str]
) -> None:
    shards = Shards(URL, cache=cache)
    assert downloads == ["targets.npy"]
    read(shards, [7, 8])
    assert downloads == ["targets.npy", SHARDS[1]]
    read(shards, list(range(COUNT)))
    assert sorted(downloads) == [*SHARDS, "targets.npy"]
    # The same content in another place, and in another process.
    put(system, folder, "memory://other/copy")
    assert Shards("memory://other/copy", cache=cache).verify() == []
    assert len(downloads) == 6
    # Other content under the same names.
    shutil.rmtree(folder)
    write_shards(ArraySet(inputs=np.ones((COUNT, 9)), targets=np.arange(COUNT)), folder)
    put(system, folder)
    assert read(Shards(URL, cache=cache), [7])[0].tolist() == [[1.0] * 9]


def test_processes_of_a_host_do_not_download_a_file_twice(folder: Path, cache: Path) -> None:
    command = [sys.executable, "-c", READS, f"file://{folder}", str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(" ".join(said).split()) == [*SHARDS, "targets.npy"]


def test_what_a_killed_process_had_of_a_file_is_not_read(folder: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, f"file://{folder}", str(cache)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = cache.rglob("*.part")
    assert left.stat().st_size == 100
    shards = Shards(f"file://{folder}", cache=cache)
    np.testing.assert_array_equal(read(shards, list(range(COUNT)))[0], numbers().inputs)
    assert not list(cache.rglob("*.part"))


@pytest.mark.usefixtures("system")
def test_a_training_fetches_all_shards_beside_its_steps(cache: Path, downloads: list[str]) -> None:
    shards = Shards(URL, cache=cache)
    shards.prefetch()
    eventually(lambda: all((shards.folder / name).exists() for name in SHARDS), within_s=10)
    read(shards, list(range(COUNT)))
    assert sorted(downloads) == [*SHARDS, "targets.npy"]


def test_a_file_that_is_damaged_in_the_cache_is_downloaded_again(
    system: Any, cache: Path, downloads: list[str]
) -> None:
    shards = Shards(URL, cache=cache)
    assert shards.verify() == []
    for name, content in ((SHARDS[0], b"x" * (shards.folder / SHARDS[0]).stat().st_size), (SHARDS[1], b"x")):
        (shards.folder / name).write_bytes(content)
    downloads.clear()
    again = Shards(URL, cache=cache)
    np.testing.assert_array_equal(read(again, list(range(COUNT)))[0], numbers().inputs)
    assert downloads == SHARDS[:2]
    assert system.exists(URL)


def forget(shards: Shards) -> None:
    """Remove what is recorded of verified files, as in a cache of an earlier version."""
    for record in shards.folder.glob(".*.seen"):
        record.unlink()


@pytest.mark.usefixtures("system")
def test_a_file_is_hashed_once_by_all_ranks_and_not_again(cache: Path, hashed: list[str]) -> None:
    ranks = [Shards(URL, cache=cache) for _ in range(3)]
    for shards in ranks:
        read(shards, list(range(COUNT)))
    # By the one that downloaded it.
    assert hashed == []
    forget(ranks[0])
    for _ in range(2):
        for shards in [Shards(URL, cache=cache) for _ in range(3)]:
            read(shards, list(range(COUNT)))
        assert hashed == SHARDS


@pytest.mark.usefixtures("system")
def test_ranks_hash_different_files_at_the_same_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(URL, cache=cache)
    read(shards, list(range(COUNT)))
    forget(shards)
    together, names = threading.Barrier(2), list[str]()

    def waiting(file: Path) -> str:
        names.append(file.name)
        if len(names) <= 2:
            # Only if another rank hashes at this moment.
            together.wait(20)
        return sha256_of(file)

    monkeypatch.setattr("penstock.train.data.remote_shards.sha256_of", waiting)
    monkeypatch.setattr("penstock.train.data.remote_shards.AT_ONCE", 1)
    ranks = [Shards(URL, cache=cache) for _ in range(2)]
    for rank in ranks:
        rank.prefetch()
    eventually(lambda: len(list(cache.rglob(".*.seen"))) == len(SHARDS), within_s=10)
    for rank in ranks:
        read(rank, list(range(COUNT)))
    assert sorted(names) == SHARDS


def test_a_write_that_keeps_size_and_time_is_found(cache: Path, folder: Path, hashed: list[str]) -> None:
    url = f"file://{folder}"
    shards = Shards(url, cache=cache)
    read(shards, list(range(COUNT)))
    file = shards.folder / SHARDS[0]
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    np.testing.assert_array_equal(read(Shards(url, cache=cache), [0, 7])[0], numbers().inputs[[0, 7]])
    assert hashed == SHARDS[:1]


@pytest.mark.usefixtures("system")
def test_a_disk_that_loses_bits_is_found_by_verify(cache: Path, downloads: list[str], hashed: list[str]) -> None:
    shards = Shards(URL, cache=cache)
    read(shards, list(range(COUNT)))
    file, record = shards.folder / SHARDS[0], shards.folder / f".{SHARDS[0]}.seen"
    file.write_bytes(bytes(file.stat().st_size))
    # Nothing of the file shows it.
    sha256, stat = record.read_text().split()[0], file.stat()
    record.write_text(f"{sha256} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n")
    downloads.clear()
    assert Shards(URL, cache=cache).verify() == []
    assert downloads == SHARDS[:1]
    assert hashed == SHARDS
    np.testing.assert_array_equal(read(Shards(URL, cache=cache), [0])[0], numbers().inputs[[0]])


@pytest.mark.usefixtures("system")
def test_a_file_that_is_damaged_is_fetched_again_beside_the_steps(cache: Path, downloads: list[str]) -> None:
    shards = Shards(URL, cache=cache)
    read(shards, list(range(COUNT)))
    (shards.folder / SHARDS[2]).write_bytes(bytes((shards.folder / SHARDS[2]).stat().st_size))
    downloads.clear()
    again = Shards(URL, cache=cache)
    again.prefetch()
    eventually(lambda: downloads == [SHARDS[2]], within_s=10)
    np.testing.assert_array_equal(read(again, [12])[0], numbers().inputs[[12]])
    assert downloads == [SHARDS[2]]


def test_a_file_that_changed_since_the_index_was_read_is_bad(system: Any, cache: Path) -> None:
    shards = Shards(URL, cache=cache)
    size = system.info(f"{URL}/{SHARDS[1]}")["size"]
    for content in (b"x" * size, b"x"):
        system.pipe_file(f"{URL}/{SHARDS[1]}", content)
        with pytest.raises(BadExample, match=rf"^{URL}/00001.npy is not what index.json says, so it changed") as caught:
            read(shards, [0, 7])
        assert (caught.value.index, caught.value.name) == (7, SHARDS[1])
    np.testing.assert_array_equal(read(shards, [0, 12])[0], numbers().inputs[[0, 12]])
    assert not (shards.folder / SHARDS[1]).exists()


def test_a_file_that_is_missing_or_short_is_bad_from_the_start(system: Any, cache: Path, downloads: list[str]) -> None:
    system.rm_file(f"{URL}/{SHARDS[1]}")
    system.pipe_file(f"{URL}/{SHARDS[2]}", b"short")
    shards = Shards(URL, cache=cache)
    for index, says in ((7, "00001.npy is missing; write"), (12, "00002.npy has 5 bytes where 308 were written")):
        with pytest.raises(BadExample, match=f"^{URL}/{says}"):
            read(shards, [index])
    assert [sentence.partition(" ")[0] for sentence in shards.verify()] == [f"{URL}/{name}" for name in SHARDS[1:3]]
    assert not {SHARDS[1], SHARDS[2]} & set(downloads)


@pytest.mark.usefixtures("system", "no_waits")
def test_a_bucket_that_fails_for_some_time_is_asked_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(URL, cache=cache)
    download, failures = RemoteFolder.download, [2]

    def failing(self: RemoteFolder, name: str, file: Path) -> None:
        failures[0] -= 1
        if failures[0] >= 0:
            raise StorageError(f"{self}/{name} cannot be read (busy); check the address and the network.")
        download(self, name, file)

    monkeypatch.setattr(RemoteFolder, "download", failing)
    np.testing.assert_array_equal(read(shards, [7])[0], numbers().inputs[[7]])
    failures[0] = 100
    # Not of the example: no other one is read in its place.
    with pytest.raises(StorageError, match=rf"^{URL}/00002.npy cannot be read \(busy\)"):
        read(shards, [12])
    shards.prefetch()
    eventually(lambda: failures[0] <= 100 - 3 - 3, within_s=10)
    failures[0] = 0
    np.testing.assert_array_equal(read(shards, [12])[0], numbers().inputs[[12]])


def test_shards_that_are_not_there_are_a_sentence(system: Any, folder: Path, cache: Path) -> None:
    with pytest.raises(TrainError, match=r"^memory://nowhere/x holds no shards \(no index.json\), or there is no such"):
        Shards("memory://nowhere/x", cache=cache)
    system.pipe_file(f"{URL}/index.json", b"{")
    with pytest.raises(TrainError, match=rf"^{URL}/index.json is not JSON"):
        Shards(URL, cache=cache)
    write_parts({"train": numbers(), "test": numbers()}, folder.parent / "parts")
    put(system, folder.parent / "parts")
    with pytest.raises(TrainError, match=rf"^{URL} has its shards in subfolders; give one of them: {URL}/train, {URL}"):
        Shards(URL, cache=cache)
    assert len(Shards(f"{URL}/train", cache=cache)) == COUNT


def test_an_index_whose_names_lead_out_of_the_folder_is_refused(system: Any, folder: Path, cache: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    for name in ("../other.npy", "/etc/passwd", "sub/00000.npy", ".hidden", "index.json"):
        index["shards"][0]["file"] = name
        system.pipe_file(f"{URL}/index.json", json.dumps(index).encode())
        with pytest.raises(TrainError, match=rf"^{URL}/index.json names the file '{name}'; write the shards again"):
            Shards(URL, cache=cache)


@pytest.mark.usefixtures("system")
def test_the_cache_keeps_within_its_limit_and_what_is_in_use(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    old = cache / "shards" / "an-old-one"
    old.mkdir(parents=True)
    (old / "00000.npy").write_bytes(bytes(5_000))
    monkeypatch.setenv("PENSTOCK_CACHE_GB", "0.00001")
    shards = Shards(URL)
    assert shards.folder.parent == cache / "shards"
    assert old.exists()
    monkeypatch.setenv("PENSTOCK_CACHE_GB", "0.000006")
    # All of it is needed; a second set finds room by the removal of what is not in use.
    Shards(f"file://{folder}")
    assert not old.exists()
    assert read(shards, [1])[0].shape == (1, 9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage())
    with pytest.raises(StorageError, match=r"cannot be kept in .* \(it has [\d,]+ bytes more, and 10 are free\); make"):
        Shards(URL, cache=cache / "another")
    (cache / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be kept in .*; make room there, or name another folder"):
        Shards(URL, cache=cache / "file")


class _Usage:
    free = 10


def test_what_is_in_use_stays_beyond_the_limit_and_is_said_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    monkeypatch.setenv("PENSTOCK_CACHE_GB", "0.000002")
    unused = cache / "packs" / "unused"
    unused.mkdir(parents=True)
    (unused / "model.onnx").write_bytes(bytes(1_000))
    write_shards(ArraySet(inputs=np.ones((COUNT, 9)), targets=np.arange(COUNT)), folder.parent / "second")
    with caplog.at_level(logging.WARNING):
        first = Shards(f"file://{folder}")
        again, second = Shards(f"file://{folder}"), Shards(f"file://{folder.parent}/second")
    assert not unused.exists()
    assert all(shards.verify() == [] for shards in (first, again, second))
    removed, exceeds = (record.getMessage() for record in caplog.records)
    assert removed == f"Removed {unused}, the download that was not used for longest: the cache is full"
    assert exceeds.startswith("The downloads in use take 2.")
    assert f" the limit of the cache {cache} is 2e-06 GB. They stay, and no other download does: set " in exceeds
    # Another rank does not repeat it.
    command = [sys.executable, "-c", READS, f"file://{folder.parent}/second", str(cache)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stderr == ""
    # Nothing is kept by intention.
    caplog.clear()
    monkeypatch.setenv("PENSTOCK_CACHE_GB", "0")
    Shards(f"file://{folder}", cache=cache / "another")
    assert not caplog.records


@pytest.mark.usefixtures("system")
def test_a_reader_waits_for_the_one_that_downloads_a_file(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RemoteShards(URL, cache, 10**9) for _ in range(2))
    described = Shards(URL, cache=cache).index.shards[0]
    begun, goes_on, download = threading.Event(), threading.Event(), RemoteFolder.download

    def slow(folder: RemoteFolder, name: str, file: Path) -> None:
        begun.set()
        assert goes_on.wait(20)
        download(folder, name, file)

    monkeypatch.setattr(RemoteFolder, "download", slow)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(first.ready, described, verify=True)]
        assert begun.wait(20)
        ends.append(pool.submit(second.ready, described, verify=True))
        # Long enough for a download of its own.
        time.sleep(0.2)
        assert not any(end.done() for end in ends)
        goes_on.set()
        assert [end.result(20) for end in ends] == [None, None]
    assert downloads.count(SHARDS[0]) == 1
