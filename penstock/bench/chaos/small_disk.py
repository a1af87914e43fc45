"""A small file system that can be filled, where this machine allows one."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

SIZE_MIB = 256


@final
class Disk:
    """A folder that may be a file system of its own.

    Args:
        folder: The folder.
        why_not: Why it cannot be filled; empty if it can.
    """

    def __init__(self, folder: Path, why_not: str) -> None:
        self.folder = folder
        self.why_not = why_not
        self._filler = folder / ".filler"

    def fill(self) -> None:
        """Write until no byte is free."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            for _ in range(SIZE_MIB * 2):
                file.write(bytes(1 << 20))
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            for _ in range(512):
                file.write(bytes(4096))

    def empty(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Generator[Disk]:
    """Mount a small file system in memory at a folder until the block ends, where that is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = shutil.which("mount")
    why_not = "there is no mount command"
    if tool is not None and os.geteuid() == 0:
        command = [tool, "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why_not = "" if done.returncode == 0 else " ".join(done.stderr.split()) or "mount failed"
    elif tool is not None:
        why_not = "only root may mount a file system"
    disk = Disk(folder, why_not)
    try:
        yield disk
    finally:
        disk.empty()
        if not why_not:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
