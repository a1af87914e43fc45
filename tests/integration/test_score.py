"""`penstock score` as a process: killed and run again, in a bucket, and what it says."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.score.files import OutputFolder
from tests.support.object_store import object_store
from tests.support.scored import hashes, write_numbers
from tests.support.serving import write_doubler

# Processes that load torch take long on a busy machine.
pytestmark = pytest.mark.timeout(600)
# Each batch of the network takes so long, so that a kill finds the run at its work.
SLEEP_S = 0.2
KILLS = 20
# Killed between the creation of a file and its lock.
DYING = """
import fcntl, os, signal, sys
from penstock.score.files import OutputFolder
fcntl.flock = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with OutputFolder(sys.argv[1]).written("a.parquet"):
    pass
"""


def command(bundle: Path, source: object, to: object, *options: str) -> list[str]:
    by_torch = ("--executor", "torch", "--device", "cpu", "--threads", "1")
    return [sys.executable, "-m", "penstock", "score", str(bundle), str(source), "--out", str(to), *by_torch, *options]


def score(bundle: Path, source: object, to: object, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(bundle, source, to, *options), capture_output=True, text=True, check=False)


def killed(bundle: Path, source: Path, to: Path, chance: random.Random) -> bool:
    """Start a run and kill it when it has written up to two more parts, or a little later; was it still running?"""
    before = len(list(to.glob("*.parquet")))
    wanted, wait_s = before + chance.randint(0, 2), chance.uniform(0, 0.05)
    process = subprocess.Popen(command(bundle, source, to), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and (len(list(to.glob("*.parquet"))) < wanted or not to.exists()):
        time.sleep(0.005)
    time.sleep(wait_s)
    lived = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return lived


def kill_and_compare(folder: Path, kills: int, units: int) -> None:
    bundle, rows = write_doubler(folder, sleep_s=SLEEP_S), 40
    write_numbers(folder / "in", [rows * units], rows=rows)
    whole = score(bundle, folder / "in", folder / "whole")
    assert whole.returncode == 0, whole.stderr
    chance = random.Random(7)
    done = 0
    while done < kills:
        if killed(bundle, folder / "in", folder / "out", chance):
            done += 1
        else:
            # It ended first, on a busy machine: from the beginning.
            shutil.rmtree(folder / "out")
    last = score(bundle, folder / "in", folder / "out")
    assert last.returncode == 0, last.stderr
    # Bytes, names and the manifest: no row is missing, there twice or another.
    assert hashes(folder / "out") == hashes(folder / "whole")
    table = pq.read_table(folder / "out").sort_by("row")
    assert table["row"].to_pylist() == list(range(rows * units))


@pytest.mark.thorough
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, kills=2, units=8)


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_twenty_kills_leave_each_row_once(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, kills=KILLS, units=3 * KILLS)


def test_a_file_without_a_lock_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    OutputFolder(tmp_path).remove_leftovers()
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_command_says_its_rate_and_what_it_was_bound_by(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    write_numbers(tmp_path / "in", [150, 50])
    (tmp_path / "in" / "notes.txt").write_text("mine")
    done = score(bundle, tmp_path / "in", tmp_path / "out", "--keep", "id", "--reply", "--input", "numbers=numbers")
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first == f"Rows: 200 in {tmp_path / 'out'}, 200 of them new."
    assert re.search(r" rows/s(, bound by (reading|decoding|the network|writing))? \(of the time: reading ", second)
    assert "the network " in second
    assert third == "Left out: 1 file of other kinds."
    again = score(bundle, tmp_path / "in", tmp_path / "out", "--keep", "id", "--reply", "--input", "numbers=numbers")
    assert again.stdout.startswith(f"Rows: 200 in {tmp_path / 'out'}, 0 of them new.\n")


def test_a_mistake_is_a_sentence_before_the_network_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for arguments, sentence in (
        (("app.py", tmp_path / "in", tmp_path / "out"), "chains are not scored, so give the bundle of each part"),
        ((tmp_path / "none", tmp_path / "in", tmp_path / "out"), "holds no files to score; check the path"),
        ((tmp_path / "none", tmp_path / "absent", tmp_path / "out"), f"there is no {tmp_path / 'absent'}; check the"),
    ):
        done = score(*arguments)  # pyright: ignore[reportArgumentType]
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("penstock: ")
        assert sentence in done.stderr


@pytest.mark.thorough
def test_a_bucket_is_scored_into_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_doubler(tmp_path)
    write_numbers(tmp_path / "in", [120], rows=50)
    with object_store("bucket") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.request("PUT", "bucket/in/000.parquet", (tmp_path / "in" / "000.parquet").read_bytes())
        done = score(bundle, "s3://bucket/in", "s3://bucket/out")
        assert done.returncode == 0, done.stderr
        parts = [name for name in store.names("bucket") if name.startswith("out/")]
        assert len([name for name in parts if name.endswith(".parquet")]) == 3
        assert "out/_manifest.json" in parts
        again = score(bundle, "s3://bucket/in", "s3://bucket/out")
        assert "0 of them new" in again.stdout
        refused = score(bundle, "s3://bucket/in", "s3://nobodys/out")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("penstock: s3://nobodys/out")
        assert "the bucket or the file is not there" in refused.stderr
        assert os.environ["AWS_ENDPOINT_URL"] in store.environment.values()
