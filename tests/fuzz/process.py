"""Memory and descriptors of a server's process, from /proc."""

import os
from pathlib import Path

LISTENING = "0A"


def listening_on(port: int) -> int | None:
    """Find the process that listens on a port; None if it is not visible."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    inodes = {line[9] for line in lines if line[3] == LISTENING and int(line[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
    return None


def memory_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """Count the open files and sockets of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
