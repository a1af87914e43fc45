"""A server's processes as Linux shows them in /proc: which there are, whose connections are whose, what they use."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

_CHILD = b"penstock.serve.process"
SUPERVISOR = "supervisor"
# The kernel's list may lack a line when connections come and go while it is read.
READS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What one process uses at one moment.

    Args:
        memory_bytes: Its proportional share (PSS) of anonymous and shared memory: what several map counts once
            in their sum. Pages of files are left out: their shares change with whoever else maps the same library.
        descriptors: Open files and sockets.
        threads: Its threads.
    """

    memory_bytes: int
    descriptors: int
    threads: int


def children(supervisor: int) -> dict[str, int]:
    """The process of each role, `engine`, `engine N on DEVICE` or `front-end N`; ones that have ended are left out."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(parent) == supervisor and state != "Z" and _CHILD in words:
            found[json.loads(words[words.index(_CHILD) + 1])[0]] = int(entry.name)
    return found


def use_of(process: int) -> Use | None:
    """What a process uses now; None if it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        threads = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Threads:"))
        descriptors = len(os.listdir(folder / "fd"))
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    except (OSError, StopIteration):
        return None
    return Use(memory_bytes=kilobytes * 1024, descriptors=descriptors, threads=int(threads.split()[1]))


def client_ports(process: int, server_port: int) -> frozenset[int]:
    """The ports of the clients whose connections a process has accepted."""
    held = {os.readlink(entry) for entry in _descriptors(process)}
    ports: set[int] = set()
    for _ in range(READS):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f":{server_port:04X}") and f"socket:[{fields[9]}]" in held:
                ports.add(int(fields[2].rpartition(":")[2], 16))
    return frozenset(ports)


def _descriptors(process: int) -> list[Path]:
    try:
        return [entry for entry in Path(f"/proc/{process}/fd").iterdir() if entry.is_symlink()]
    except OSError:
        return []
