"""Checkpoints that are written while the training goes on: the steps wait for a copy of the state, and for no disk.

Each process copies what it keeps of the state and writes it in a thread of its own. That thread asks nothing of the
others but files: a collective there would meet those of the steps. The first process's waits for the parts of all, and
gives the checkpoint its name.
"""

import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from penstock.core.errors import TrainError
from penstock.train.checkpoint import announce, clear, file_of, manifest_of, publish, write_blocks
from penstock.train.snapshot import Copy, Part, keepers, split
from penstock.train.world import World

STATE = "state"
# How long an error that ends the run is kept back for a checkpoint that is being written.
LEAVE_S = 20.0


@final
class Saver:
    """Writes checkpoints into a folder, one after the other.

    A checkpoint that is due while another one is being written waits for it. Left without an error, all is written.

    Args:
        folder: Of the checkpoints; all processes must see it.
        world: The processes; all make it together.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder, world
        folder.mkdir(parents=True, exist_ok=True)
        if world.is_first:
            clear(folder)
        # Known to all after what was left is gone. What a process of the run before may still write is named otherwise.
        (token,) = world.of_first([float(secrets.randbits(32))])
        self._token = f"{int(token):08x}"
        self._files: dict[str, _File] = {}
        self._place: Path | None = None
        self._thread: threading.Thread | None = None
        self._own_written = threading.Event()
        self._given_up = threading.Event()
        self._failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            # The others may be gone, and what is asked of them in vain: all each can do is to write its own part.
            self._thread.join(LEAVE_S)
        self._given_up.set()

    @property
    def is_busy(self) -> bool:
        """Whether this process still writes a checkpoint, or waits for the others' parts of it."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether this process could not write; the others know by `check`."""
        return self._failure is not None

    def save(self, step: int, state: dict[str, Any], versions: Mapping[str, int | None]) -> None:
        """Begin a checkpoint. All processes must ask, with states alike but for their parts.

        Args:
            step: Steps taken.
            state: Nested dicts and lists of tensors, parts of tensors and JSON values.
            versions: For first keys of the state whose tensors seldom change: a number that changes when they do. While
                it does not, what was written of them is linked and not written again.

        Raises:
            TrainError: The checkpoint before could not be written, or the state holds what cannot be kept.
        """
        self.wait()
        parts: dict[str, Part] = {}
        values = split(state, "", parts)
        groups: dict[str, dict[str, Part]] = {group: {} for group in (STATE, *versions)}
        for path, part in parts.items():
            first = path.split("/")[1]
            groups[first if first in versions else STATE][path] = part
        files = [self._copied(group, mine, versions.get(group)) for group, mine in groups.items() if mine]
        manifest = manifest_of(step, values, groups, self._world.size) if self._world.is_first else None
        self._own_written.clear()
        self._thread = threading.Thread(
            target=self._write, args=(step, files, manifest), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _copied(self, group: str, parts: Mapping[str, Part], version: int | None) -> "_File":
        rank, kept_by = self._world.rank, keepers(parts, self._world.size)
        if group not in self._files:
            self._files[group] = _File(name=file_of(group, rank), copy=Copy(self._world.device))
        self._files[group].take({path: part.own for path, part in parts.items() if rank in kept_by[path]}, version)
        return self._files[group]

    def wait(self) -> None:
        """Until the checkpoint that was begun last is there. All processes must wait.

        Raises:
            TrainError: One of them could not write.
        """
        if self._thread is None:
            return
        self._own_written.wait()
        # Parts that will not come must not be waited for.
        self.check()
        self._thread.join()
        self._thread = None
        self.check()

    def check(self) -> None:
        """See whether all processes could write so far. All must ask.

        Raises:
            TrainError: One could not.
        """
        if not self._world.total(float(self.has_failed))[0]:
            return
        self._given_up.set()
        reasons = self._world.counts({self._failure: 1} if self._failure else {})
        raise TrainError(
            f"a checkpoint cannot be written: {'; '.join(sorted(reasons))}. Make room or mend the folder, and go on "
            f"from the one before."
        )

    def _write(self, step: int, files: "list[_File]", manifest: dict[str, Any] | None) -> None:
        place = self._folder / f"step-{step:08d}"
        beside = place.with_name(f".{place.name}-{self._token}")
        try:
            beside.mkdir(exist_ok=True)
            written = {file.name: file.write(beside, self._place) for file in files}
            announce(beside, self._world.rank, written)
            self._own_written.set()
            if manifest is None or publish(beside, place, manifest, self._given_up):
                self._place = place
        except Exception as error:  # noqa: BLE001 - the top of this thread; the steps end with it
            self._failure = _reason(error, place)
        finally:
            self._own_written.set()


@final
class _File:
    """One of this process's files of each checkpoint."""

    def __init__(self, *, name: str, copy: Copy) -> None:
        self.name = name
        self._copy = copy
        self._version: int | None = None
        self._written: dict[str, Any] | None = None

    def take(self, tensors: Mapping[str, Any], version: int | None) -> None:
        """Copy what the next checkpoint has, unless it is what the last one had."""
        if version is None or version != self._version:
            self._copy.take(tensors)
            self._version, self._written = version, None

    def write(self, beside: Path, last: Path | None) -> dict[str, Any]:
        """Write it, or link what was written for the last checkpoint."""
        if self._written is not None and last is not None:
            # A file system without links gets it again.
            with suppress(OSError):
                (beside / self.name).hardlink_to(last / self.name)
                return self._written
        self._written = write_blocks(beside / self.name, self._copy.blocks(), self._copy.size)
        return self._written


def _reason(error: Exception, place: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or place})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
