"""A server's processes in /proc: their roles, their connections and their usage."""

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.machine.process_stat import read_stat

_CHILD, _FORKS = b"penstock.serve.control.child_main", b"penstock.serve.control.fork_server_main"
SUPERVISOR = "supervisor"

# From <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NETLINK_ERROR, _NETLINK_DONE = 2, 3
# NLM_F_REQUEST and NLM_F_DUMP.
_DUMP = 0x301
_NETLINK_HEAD, _NETLINK_BYTES = struct.Struct("=IHHII"), 1 << 16
_DIAG_QUERY, _SOCKET_ID_BYTES = struct.Struct("=BBBBI"), 48
# In `inet_diag_msg`: the ports in the order of the network, and the inode.
_PORTS, _PORTS_AT, _INODE, _INODE_AT = struct.Struct("!HH"), 4, struct.Struct("=I"), 68
# All but SYN_RECV, TIME_WAIT, CLOSE, and LISTEN.
_OPEN_STATES = 0xFFF & ~(1 << 3 | 1 << 6 | 1 << 7 | 1 << 10)


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
        process = int(entry.name)
        stat = read_stat(process)
        if stat is not None and stat.parent == parent and not stat.ended:
            found.append(process)
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
    held: set[int] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(entry).partition(":")
                if kind == "socket":
                    held.add(int(inode[1:-1]))
    return frozenset(port for inode, port in _connections(server_port) if inode in held)


def _connections(server_port: int) -> Iterator[tuple[int, int]]:
    """Read the server's ends of its connections by IPv4 from the kernel: the inode and the client's port of each.

    /proc/net/tcp has thousands of sockets in TIME_WAIT, too: it takes tens of milliseconds.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        query = _DIAG_QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _OPEN_STATES) + bytes(_SOCKET_ID_BYTES)
        kernel.send(_NETLINK_HEAD.pack(_NETLINK_HEAD.size + len(query), _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0) + query)
        while True:
            part = memoryview(kernel.recv(_NETLINK_BYTES))
            while part:
                length, kind, *_ = _NETLINK_HEAD.unpack_from(part)
                if kind == _NETLINK_DONE:
                    return
                if kind == _NETLINK_ERROR:
                    raise OSError("the kernel does not list its connections.")
                own, other = _PORTS.unpack_from(part, _NETLINK_HEAD.size + _PORTS_AT)
                if own == server_port:
                    (inode,) = _INODE.unpack_from(part, _NETLINK_HEAD.size + _INODE_AT)
                    yield inode, other
                part = part[(length + 3) & ~3 :]
