"""Asynchronous checkpoints: steps wait for a copy of the state to host memory, not for the disk.

Each process writes its copy in a second thread. The threads synchronize by files, because a collective there would pair
up with those of the steps. Rank 0's thread waits for the files of all processes and renames the checkpoint.
"""

import secrets
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, final

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import (
    file_of,
    manifest_of,
    mark_written,
    publish,
    step_folder,
    write_blocks,
)
from penstock.train.checkpoint.snapshot import HostCopy, SlicedTensor, split, writers_of
from penstock.train.parallel.world import World
from penstock.train.run_owner import RunAttempt, RunTakenOver, clear_unnamed

STATE = "state"
# Limit of the wait for a checkpoint in progress after an error that ends the run.
LEAVE_S = 20.0


@final
class Saver(AbstractContextManager["Saver"]):
    """Writes checkpoints into a folder, one at a time.

    Leaving the context without an error waits for the last one.

    Args:
        folder: The folder of the checkpoints, shared by all processes.
        world: The processes; a collective call.
        attempt: This attempt of the run, in the first process: once a newer one has begun, no checkpoint is named.
    """

    def __init__(self, folder: Path, world: World, attempt: RunAttempt | None = None) -> None:
        self._folder, self._world, self._attempt = folder, world, attempt
        folder.mkdir(parents=True, exist_ok=True)
        if world.is_rank_zero:
            clear_unnamed(folder)
        # Broadcast after the clean-up. The token separates files that a process of an earlier run may still write.
        (token,) = world.broadcast_on_host([float(secrets.randbits(32))])
        self._token = f"{int(token):08x}"
        self._files: dict[str, _File] = {}
        self._place: Path | None = None
        self._thread: threading.Thread | None = None
        self._own_written = threading.Event()
        self._given_up = threading.Event()
        self._failure: str | None = None
        self._taken_over: RunTakenOver | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            # Other processes may be gone: no collective, each process only finishes its own files.
            self._thread.join(LEAVE_S)
        self._given_up.set()

    @property
    def is_busy(self) -> bool:
        """True while this process writes a checkpoint or waits for the files of others."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if this process failed to write; `check` raises in all processes."""
        return self._failure is not None

    def save(self, step: int, state: dict[str, Any], versions: Mapping[str, int | None]) -> None:
        """Start a checkpoint. A collective call, with states that differ in their weight slices only.

        Args:
            step: Steps taken.
            state: Nested dicts and lists of tensors, `SlicedTensor` and JSON values.
            versions: By first keys of the state whose tensors seldom change, a number that changes with them. Files of
                an unchanged version are hard-linked instead of written again.

        Raises:
            TrainError: The last checkpoint could not be written, or the state holds a value that cannot be saved.
        """
        self.wait()
        parts: dict[str, SlicedTensor] = {}
        values = split(state, "", parts)
        groups: dict[str, dict[str, SlicedTensor]] = {group: {} for group in (STATE, *versions)}
        for path, part in parts.items():
            first = path.split("/")[1]
            groups[first if first in versions else STATE][path] = part
        files = [self._copied(group, mine, versions.get(group)) for group, mine in groups.items() if mine]
        manifest = manifest_of(step, values, groups, self._world.size) if self._world.is_rank_zero else None
        self._own_written.clear()
        self._thread = threading.Thread(
            target=self._write, args=(step, files, manifest), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _copied(self, group: str, parts: Mapping[str, SlicedTensor], version: int | None) -> "_File":
        rank, kept_by = self._world.rank, writers_of(parts, self._world.size)
        if group not in self._files:
            self._files[group] = _File(name=file_of(group, rank), copy=HostCopy(self._world.device))
        self._files[group].take({path: part.own for path, part in parts.items() if rank in kept_by[path]}, version)
        return self._files[group]

    def wait(self) -> None:
        """Wait for the last checkpoint. A collective call.

        Raises:
            TrainError: A process could not write.
        """
        if self._thread is None:
            return
        self._own_written.wait()
        # Before the join, which would wait forever for the files of a process that failed.
        self.check()
        self._thread.join()
        self._thread = None
        self.check()

    def check(self) -> None:
        """Check that all processes could write so far. A collective call.

        Raises:
            TrainError: A process could not write.
        """
        if not self._world.sum_on_host(float(self.has_failed))[0]:
            return
        self._given_up.set()
        reasons = self._world.sum_counts({self._failure: 1} if self._failure else {})
        if self._taken_over is not None:
            raise self._taken_over
        raise TrainError(
            f"a checkpoint cannot be written: {'; '.join(sorted(reasons))}. Make room or repair the folder, and "
            f"resume: the run goes on from its newest checkpoint, or begins anew without one."
        )

    def _check_owner(self) -> None:
        if self._attempt is not None:
            self._attempt.check()

    def _write(self, step: int, files: "list[_File]", manifest: dict[str, Any] | None) -> None:
        place = step_folder(self._folder, step)
        beside = place.with_name(f".{place.name}-{self._token}")
        try:
            beside.mkdir(exist_ok=True)
            self._check_owner()
            written = {file.name: file.write(beside, self._place) for file in files}
            mark_written(beside, self._world.rank, written)
            self._own_written.set()
            if manifest is None or publish(beside, place, manifest, self._given_up, self._check_owner):
                self._place = place
        except RunTakenOver as error:
            self._taken_over, self._failure = error, "another command has taken over the run"
        except Exception as error:  # noqa: BLE001 - the top of this thread; the steps end with it
            self._failure = _reason(error, place)
        finally:
            self._own_written.set()


@final
class _File:
    """One file of each checkpoint that this process writes."""

    def __init__(self, *, name: str, copy: HostCopy) -> None:
        self.name = name
        self._copy = copy
        self._version: int | None = None
        self._written: dict[str, Any] | None = None

    def take(self, tensors: Mapping[str, Any], version: int | None) -> None:
        """Copy tensors for the next checkpoint, unless their version is unchanged."""
        if version is None or version != self._version:
            self._copy.take(tensors)
            self._version, self._written = version, None

    def write(self, beside: Path, last: Path | None) -> dict[str, Any]:
        """Write the file, or link the last checkpoint's."""
        if self._written is not None and last is not None:
            # A file system without hard links gets a copy.
            with suppress(OSError):
                (beside / self.name).hardlink_to(last / self.name)
                return self._written
        self._written = write_blocks(beside / self.name, self._copy.blocks(), self._copy.size)
        return self._written


def _reason(error: Exception, place: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or place})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
