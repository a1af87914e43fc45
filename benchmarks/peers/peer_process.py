"""Virtual environments and processes of the peers."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from benchmarks.peers.servers import ROOT, ComparedServer
from penstock.bench.server_process import cpu_seconds
from penstock.core.errors import BenchError

START_S = 120.0
STOP_S = 5.0
QUIET_SAMPLE_S = 1.0
QUIET_SHARE = 0.1
LOG_SHOWN = 2000
# Written last: an environment without it, or with another digest, is created again.
STAMP = "requirements.sha256"


def make_environment(server: ComparedServer, say: Callable[[str], None]) -> None:
    """Create a peer's virtual environment from its requirements.txt, unless it exists. Penstock runs in this one.

    A .pth file adds torch, NumPy and penstock of the current environment, so that every server runs the same network
    on the same library.

    Raises:
        BenchError: pip could not install what is pinned.
    """
    if not server.tuning:
        return
    requirements = server.folder / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = server.environment / STAMP
    if stamp.is_file() and stamp.read_text() == digest:
        return
    say(f"Installing {server.label} into {server.environment.relative_to(ROOT)}")
    shutil.rmtree(server.environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", server.environment], check=True)
    python = server.environment / "bin/python"
    # requirements.txt names every package: no resolution, and no second torch.
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements]
    if subprocess.run(install, check=False).returncode != 0:
        raise BenchError(f"pip could not install {requirements.relative_to(ROOT)}; see its message above.")
    places = Path(sysconfig.get_path("purelib")), ROOT
    site = next((server.environment / "lib").glob("python*/site-packages"))
    (site / "penstock.pth").write_text("".join(f"{place}\n" for place in places))
    stamp.write_text(digest)


class Startable(Protocol):
    """A server that `running` can start."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        ...

    @property
    def environment(self) -> Path:
        """Its virtual environment; its log is beside it."""
        ...

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """Return the command that serves a bundle."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPeer:
    """A server that runs.

    Args:
        port: Its port.
        mark: What the environment of all its processes has.
    """

    port: int
    mark: str

    def cpu_seconds(self) -> float:
        """Return the user and system time of its processes."""
        return sum(map(cpu_seconds, _marked(self.mark.encode())))


@contextmanager
def running(server: Startable, model: str, bundle: Path, core: int | None) -> Generator[int]:
    """Run a server until the block ends; yields its port when it listens, see `running_peer`."""
    with running_peer(server, model, bundle, core) as peer:
        yield peer.port


@contextmanager
def running_peer(server: Startable, model: str, bundle: Path, core: int | None) -> Generator[RunningPeer]:
    """Run a server until the block ends; yields it when it listens.

    Args:
        server: The server.
        model: Name of the model.
        bundle: The bundle to serve.
        core: The core of all its processes; None for all cores.

    Raises:
        BenchError: It did not listen in time, or ended.
    """
    port, token = _free_port(), secrets.token_hex(8)
    log = server.environment.with_suffix(".log")
    log.parent.mkdir(exist_ok=True)
    # Every process of the server inherits the mark, even one that leaves its process group.
    mark = f"PENSTOCK_PEER={token}"
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    command = ["env", mark, *pinned, *server.command(model, bundle.resolve(), port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=ROOT, start_new_session=True)
    try:
        _wait_until_it_listens(server, process, port, log)
        yield RunningPeer(port=port, mark=mark)
    finally:
        # A second Ctrl-C must not leave processes of the server behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        _stop(process, mark.encode())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_quiet(patience_s: float, say: Callable[[str], None]) -> None:
    """Wait until the processor is idle.

    Args:
        patience_s: The longest wait.
        say: Called with a warning after it: figures are then too low.
    """
    given_up_s = time.monotonic() + patience_s
    while (busy := _busy_share(QUIET_SAMPLE_S)) > QUIET_SHARE:
        if time.monotonic() > given_up_s:
            say(f"Other processes take {busy:.0%} of the processor: figures measured now are too low.")
            return


def _busy_share(seconds: float) -> float:
    """The busy share of all cores' time."""

    def ticks() -> tuple[int, int]:
        # user nice system idle iowait irq softirq steal
        counted = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(counted), counted[3] + counted[4]

    total, idle = ticks()
    time.sleep(seconds)
    later_total, later_idle = ticks()
    return 1 - (later_idle - idle) / max(later_total - total, 1)


def is_listening(host: str, port: int) -> bool:
    """Return whether a server accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _wait_until_it_listens(server: Startable, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    given_up_s = time.monotonic() + START_S
    while time.monotonic() < given_up_s:
        if process.poll() is not None:
            raise BenchError(f"{server.label} ended while it started; its log ends with:\n{_end_of(log)}")
        if is_listening("127.0.0.1", port):
            return
        time.sleep(0.1)
    raise BenchError(f"{server.label} did not listen within {START_S:g} s; its log ends with:\n{_end_of(log)}")


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
    """Running processes that inherited a mark."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # Empty for a zombie.
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
