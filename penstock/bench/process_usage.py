"""A server's processes in /proc: their roles, their connections and their usage."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CHILD, _FORKS = b"penstock.serve.control.child_main", b"penstock.serve.control.fork_server_main"
SUPERVISOR = "supervisor"
# A line of the kernel's list may be missing when connections come and go during the read.
READS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessUsage:
    """Usage of one process at one moment.

    Args:
        memory_bytes: Its proportional share (PSS) of anonymous and shared memory, so that the sum over processes counts
            shared memory once. Pages of files are left out: their shares depend on unrelated processes.
        descriptors: Open files and sockets.
        threads: Number of threads.
    """

    memory_bytes: int
    descriptors: int
    threads: int


def worker_pids(supervisor: int) -> dict[str, int]:
    """Return the process of each role: `engine`, `engine N on DEVICE` or `front-end N`, without those that ended."""
    found: dict[str, int] = {}
    for process in child_pids(supervisor):
        folder = Path(f"/proc/{process}")
        try:
            name = (folder / "comm").read_text()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if _CHILD in words:
            found[json.loads(words[words.index(_CHILD) + 1])[0]] = process
        elif _FORKS in words and name.startswith("front-end"):
            found[name.strip()] = process
    return found


def child_pids(parent: int) -> list[int]:
    """Return the children of a process, without those that ended."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found.append(int(entry.name))
    return found


def read_usage(process: int) -> ProcessUsage | None:
    """Return the usage of a process now; None if it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        threads = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Threads:"))
        descriptors = len(os.listdir(folder / "fd"))
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    except (OSError, StopIteration):
        return None
    return ProcessUsage(memory_bytes=kilobytes * 1024, descriptors=descriptors, threads=int(threads.split()[1]))


def client_ports(process: int, server_port: int) -> frozenset[int]:
    """Return the client ports of the connections that a process has accepted; exact for one that is stopped."""
    held: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                held.add(os.readlink(entry))
    ports: set[int] = set()
    for _ in range(READS):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f":{server_port:04X}") and f"socket:[{fields[9]}]" in held:
                ports.add(int(fields[2].rpartition(":")[2], 16))
    return frozenset(ports)
