"""The compiled load generators: C++ sources beside their Python callers, built by the machine's compiler on first use.

Each reads a job from stdin and writes its outcome to stdout. They do what the Python senders do in a fraction of their
CPU time, which counts where generator and server share cores.
"""

import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Literal, final

from penstock.bench.socket_loop import CONNECT_S
from penstock.core.errors import BenchError
from penstock.core.remote.remote_copy import DEFAULT_CACHE

SenderKind = Literal["auto", "compiled", "python"]
KINDS: tuple[SenderKind, ...] = ("auto", "compiled", "python")
COMPILERS = ("g++", "clang++", "c++")
# Headers are found from here.
INCLUDED = Path(__file__).parent
OPTIONS = ("-O2", "-std=c++17", f"-I{INCLUDED}")
BUILD_S = 120.0
# Of a process, beyond the end of its load.
OVERTIME_S = 30.0


def checked_kind(name: str) -> SenderKind:
    """Return the sender of a name, with `"auto"` decided: the compiled one where a compiler is installed.

    Raises:
        BenchError: There is no such sender, or no compiler for it.
    """
    compiler = find_compiler()
    if name == "python" or (name == "auto" and compiler is None):
        return "python"
    if name not in KINDS:
        raise BenchError(f"--sender is {name!r}; choose one of {', '.join(KINDS)}.")
    if compiler is None:
        raise BenchError(f"the compiled sender needs one of {', '.join(COMPILERS)}; install g++, or choose python.")
    return "compiled"


def find_compiler() -> str | None:
    """Return the C++ compiler of this machine; None if there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compiled_program(source: Path, cache: Path = DEFAULT_CACHE) -> Path:
    """Return the program of a source, building it if need be.

    Args:
        source: Its C++ source.
        cache: The folder that holds it.

    Raises:
        BenchError: There is no compiler, or it cannot be built.
    """
    checked_kind("compiled")
    compiler = find_compiler()
    assert compiler is not None, source
    read = b"".join(file.read_bytes() for file in (source, *sorted(INCLUDED.rglob("*.h"))))
    digest = hashlib.sha256(read + compiler.encode()).hexdigest()[:16]
    program = cache.expanduser() / "bench" / f"{source.stem}-{digest}"
    if not program.is_file():
        _build(compiler, source, program)
    return program


def _build(compiler: str, source: Path, program: Path) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_suffix(f".{os.getpid()}")
    command = [compiler, *OPTIONS, str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} failed: {done.stderr[-500:]} Choose the python sender.")
    unfinished.replace(program)


def resolved(host: str, port: int) -> tuple[str, int, bool]:
    """Return the numeric address of a server that accepts, its port, and if it is one of IPv6.

    Raises:
        BenchError: The server cannot be reached.
    """
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as first:
            address, port = first.getpeername()[:2]
    except OSError as error:
        raise BenchError(f"{host}:{port} cannot be reached ({error}).") from None
    return address, port, ip_address(address).version == 6


@final
@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A process of a compiled sender, which has its job.

    Args:
        process: The process.
        written: What it writes.
    """

    process: subprocess.Popen[bytes]
    written: IO[bytes]

    def outcome(self, end_s: float) -> IO[bytes]:
        """Wait until the process ends; return what it wrote.

        Args:
            end_s: When its load is over, on the machine's monotonic clock.

        Raises:
            BenchError: It failed, or did not end in time.
        """
        try:
            _, said = self.process.communicate(timeout=max(0.0, end_s - time.monotonic()) + OVERTIME_S)
        except subprocess.TimeoutExpired:
            raise BenchError("the compiled sender did not end in time; choose the python sender.") from None
        code = self.process.returncode
        if code != 0:
            raise BenchError(f"the compiled sender failed: {said.decode(errors='replace').strip() or code}.")
        self.written.seek(0)
        return self.written


@contextmanager
def running_program(program: Path, job: Iterable[bytes], cpus: frozenset[int] | None) -> Generator[RunningProgram]:
    """Run a compiled sender; it is killed at the end of the block.

    Args:
        program: The program.
        job: Its job, in parts.
        cpus: Its cores; None for any.
    """
    # First: it may find that there is no server.
    data = b"".join(job)
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as written,
        subprocess.Popen([program], stdin=pipe, stdout=written, stderr=pipe) as process,
    ):
        try:
            if cpus is not None:
                os.sched_setaffinity(process.pid, cpus)
            _send(process, data)
            yield RunningProgram(process, written)
        finally:
            process.kill()
            process.communicate()


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass  # `outcome` says why it ended
    process.stdin = None
