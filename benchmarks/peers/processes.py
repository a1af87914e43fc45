"""Virtual environments of the peers, and their processes from start to a certain end."""

import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.peers.contestants import ROOT, Contestant
from penstock.core.errors import BenchError

START_S = 120.0
STOP_S = 5.0
QUIET_SAMPLE_S = 1.0
QUIET_SHARE = 0.1
LOG_SHOWN = 2000
# Written last: an environment without it, or of other requirements, is made again.
STAMP = "requirements.sha256"


def make_environment(contestant: Contestant, say: Callable[[str], None]) -> None:
    """Make a peer's virtual environment from its requirements.txt, unless it is there. Penstock runs in this one.

    The torch, NumPy and penstock in it are those of the environment that runs this, seen through a .pth file, so that
    every server runs the same network on the same library.

    Raises:
        BenchError: pip could not install what is pinned.
    """
    if not contestant.tuned:
        return
    requirements = contestant.folder / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = contestant.environment / STAMP
    if stamp.is_file() and stamp.read_text() == digest:
        return
    say(f"Installing {contestant.label} into {contestant.environment.relative_to(ROOT)}")
    shutil.rmtree(contestant.environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", contestant.environment], check=True)
    python = contestant.environment / "bin/python"
    # requirements.txt names everything, so nothing is resolved and no second torch can come.
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements]
    if subprocess.run(install, check=False).returncode != 0:
        raise BenchError(f"pip could not install {requirements.relative_to(ROOT)}; see its message above.")
    places = Path(sysconfig.get_path("purelib")), ROOT
    site = next((contestant.environment / "lib").glob("python*/site-packages"))
    (site / "penstock.pth").write_text("".join(f"{place}\n" for place in places))
    stamp.write_text(digest)


class Started(Protocol):
    """What `running` needs to know of a server."""

    @property
    def label(self) -> str:
        """What it is called in tables."""
        ...

    @property
    def environment(self) -> Path:
        """Its virtual environment; its log lies beside it."""
        ...

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """What starts it on a bundle."""
        ...


@contextmanager
def running(contestant: Started, model: str, bundle: Path, core: int) -> Generator[int]:
    """Run a server on one core until the block ends; gives its port when it answers.

    Args:
        contestant: Which.
        model: The model's name, for its tuning and path.
        bundle: What it serves.
        core: The core that all of its processes share.

    Raises:
        BenchError: It did not answer in time, or ended.
    """
    port, token = _free_port(), secrets.token_hex(8)
    log = contestant.environment.with_suffix(".log")
    log.parent.mkdir(exist_ok=True)
    # Every process that the server starts inherits the mark, also one that leaves its group.
    mark = f"PENSTOCK_PEER={token}"
    command = ["env", mark, "taskset", "-c", str(core), *contestant.command(model, bundle.resolve(), port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=ROOT, start_new_session=True)
    try:
        _wait_until_it_listens(contestant, process, port, log)
        yield port
    finally:
        # A second Ctrl-C must not leave half of the server's processes behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        _stop(process, mark.encode())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_quiet(patience_s: float, say: Callable[[str], None]) -> None:
    """Wait until other processes leave the processor alone, and say so where they do not.

    Args:
        patience_s: How long at most.
        say: Called with a sentence when the patience is over: what is measured then is too low.
    """
    given_up_s = time.monotonic() + patience_s
    while (busy := _busy_share(QUIET_SAMPLE_S)) > QUIET_SHARE:
        if time.monotonic() > given_up_s:
            say(f"Other processes take {busy:.0%} of the processor: what is measured now is too low.")
            return


def _busy_share(seconds: float) -> float:
    """The share of all cores' time that is not idle."""

    def ticks() -> tuple[int, int]:
        # user nice system idle iowait irq softirq steal
        counted = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(counted), counted[3] + counted[4]

    total, idle = ticks()
    time.sleep(seconds)
    later_total, later_idle = ticks()
    return 1 - (later_idle - idle) / max(later_total - total, 1)


def is_listening(host: str, port: int) -> bool:
    """Whether anybody takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _wait_until_it_listens(contestant: Started, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    given_up_s = time.monotonic() + START_S
    while time.monotonic() < given_up_s:
        if process.poll() is not None:
            raise BenchError(f"{contestant.label} ended while it started; its log says:\n{_end_of(log)}")
        if is_listening("127.0.0.1", port):
            return
        time.sleep(0.1)
    raise BenchError(f"{contestant.label} did not listen within {START_S:g} s; its log says:\n{_end_of(log)}")


def _stop(process: subprocess.Popen[bytes], mark: bytes) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    while marked := _marked(mark):
        for pid in marked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _marked(mark: bytes) -> list[int]:
    """The processes that inherited a mark and have not ended."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # Empty for a process that has ended and waits for its parent.
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_SHOWN:]
