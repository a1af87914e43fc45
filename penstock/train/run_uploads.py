"""Uploads of a run while it trains: checkpoints, records, and the bundle at the end."""

import json
import logging
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from penstock.core.bundles.bundle import MANIFEST
from penstock.core.errors import StorageError, TrainError
from penstock.train.callbacks.callback import Callback, CheckpointWritten, Started, Validated
from penstock.train.checkpoint.format import KEPT
from penstock.train.checkpoint.remote_checkpoints import CHECKPOINTS, complete_steps, newest_step, upload_checkpoint
from penstock.train.parallel.world import World
from penstock.train.report.run_log import RUN_FILE
from penstock.train.run_owner import Owner, RunTakenOver
from penstock.train.run_place import BUNDLE, OWNER, RunPlace, owner_of

log = logging.getLogger(__name__)

# Waits between attempts while the storage cannot be written, and the time for attempts at the end.
FIRST_WAIT_S, MAX_WAIT_S, FINAL_S = 2.0, 60.0, 30.0
# Time between uploads of the records of frequent validations.
SPACING_S = 2.0
# Limit of the wait for an upload in progress at the end; the storage's own time limits are below it.
HANGS_S = 600.0


@final
class RunUploads(Callback):
    """Uploads a run while it goes on, in a thread of the first process.

    An error of the storage does not end the training: it is logged once and tried again. Leaving the context uploads
    what is left.

    Args:
        place: The run, at a URL.
        final_s: Seconds for attempts at the end.

    Raises:
        StorageError: The URL cannot be written.
    """

    def __init__(self, place: RunPlace, *, final_s: float = FINAL_S) -> None:
        assert place.remote is not None, place
        self._folder, self._remote, self._final_s = place.folder, place.remote, final_s
        self._token = secrets.token_hex(8)
        self._uploaded: dict[str, tuple[int, int]] = {}
        # The checkpoints of an earlier command, and those that were uploaded. Those after the step that this one goes
        # on from are made again: they are damaged.
        newest = newest_step(self._folder)
        self._there = {step for step in complete_steps(self._remote.sizes()) if step <= newest}
        # Names at the URL of the newest checkpoint's files, by content.
        self._contents: dict[str, str] = {}
        # The command that has taken the run over.
        self._taken_over: str | None = None
        self._ends = False
        self._wake = threading.Condition()
        self._pending = False
        self._claim()
        self._thread = threading.Thread(target=self._upload_while_open, name="upload", daemon=True)

    def _claim(self) -> None:
        """Write the owner: what is not writable is refused before the training."""
        owner = owner_of(self._remote.read(OWNER)) or {"run": secrets.token_hex(8)}
        before = Owner.parse(owner)
        number = 1 if before is None else before.attempt + 1
        data = json.dumps({"run": owner["run"], "writer": self._token, **Owner.here(attempt=number).fields()}).encode()
        self._remote.write(OWNER, data)
        (self._folder / OWNER).write_bytes(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._wake:
            self._ends = True
            self._wake.notify()
        self._thread.join(HANGS_S)
        if self._taken_over is not None:
            if kind is None:
                self._refuse_taken_over()
            return
        hangs = f"{self._remote} does not answer; check the network."
        problem = hangs if self._thread.is_alive() else self._upload_the_rest()
        if self._taken_over is not None and kind is None:
            self._refuse_taken_over()
        if problem is None or self._taken_over is not None:
            return
        sentence = (
            f"{', '.join(self._left()) or 'a part of the run'} is not uploaded to {self._remote}, but kept in "
            f"{self._folder}: {problem} Then give the same command again, which uploads it."
        )
        if kind is None:
            raise TrainError(f"the training is finished, and {sentence}")
        log.warning("%s", sentence)

    def start(self, event: Started) -> None:
        """Upload run.json: without it nothing is a run.

        Raises:
            StorageError: The URL cannot be written.
        """
        self._send(RUN_FILE)

    def validation(self, event: Validated) -> None:
        """Upload the metrics.

        Raises:
            TrainError: Another command has taken the run over.
        """
        self._request()

    def checkpoint(self, event: CheckpointWritten) -> None:
        """Upload the checkpoint.

        Raises:
            TrainError: Another command has taken the run over.
        """
        self._request()

    def _request(self) -> None:
        self._refuse_taken_over()
        with self._wake:
            self._pending = True
            self._wake.notify()

    def _refuse_taken_over(self) -> None:
        if self._taken_over is not None:
            raise RunTakenOver(
                f"another command has taken over the run in {self._remote}, so this one has ended "
                f"({self._taken_over}); let one command train in it, or give another --out."
            )

    def _check_owner(self) -> dict[str, Any] | None:
        """Return the owner at the URL, which is this command or none.

        Raises:
            RunTakenOver: Another command has taken the run over.
        """
        owner = owner_of(self._remote.read(OWNER))
        if owner is not None and owner.get("writer") != self._token:
            found = Owner.parse(owner)
            self._taken_over = "of another version of Penstock" if found is None else str(found)
            self._refuse_taken_over()
        return owner

    def _upload_while_open(self) -> None:
        wait_s, failed = FIRST_WAIT_S, False
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ends or self._pending, wait_s if failed else None)
                if failed and not self._ends:
                    # A new checkpoint does not shorten the wait.
                    self._wake.wait_for(lambda: self._ends, wait_s)
                if self._ends:
                    return
                self._pending = False
            try:
                self._upload()
            except RunTakenOver:
                # Raised in the steps' thread by the next event.
                return
            except (OSError, StorageError) as error:
                if not failed:
                    log.warning("%s The training goes on, with its checkpoints in %s.", error, self._folder)
                wait_s, failed = min(2 * wait_s, MAX_WAIT_S) if failed else FIRST_WAIT_S, True
            else:
                if failed:
                    log.warning("%s can be written again.", self._remote)
                wait_s, failed = FIRST_WAIT_S, False
                with self._wake:
                    self._wake.wait_for(lambda: self._ends, SPACING_S)

    def _upload_the_rest(self) -> str | None:
        """Upload what is left; return the last error after `final_s`."""
        deadline_s, wait_s = time.monotonic() + self._final_s, FIRST_WAIT_S / 4
        while True:
            try:
                self._upload(ended=True)
            except RunTakenOver as error:
                return str(error)
            except (OSError, StorageError) as error:
                if time.monotonic() + wait_s > deadline_s:
                    return str(error)
                time.sleep(wait_s)
                wait_s *= 2
            else:
                return None

    def _upload(self, *, ended: bool = False) -> None:
        """Upload the files that have changed and the newest checkpoint; at the end the bundle, and run.json last."""
        if self._check_owner() is None:
            # The bucket was emptied, so that nothing of the run is there.
            self._uploaded.clear()
            self._there.clear()
            self._contents.clear()
            self._claim()
        # A run that goes on drops records after its checkpoint, and cannot make those before it again.
        newest = newest_step(self._folder)
        last = (RUN_FILE,) if ended else ()
        for name in self._changed(without=(CHECKPOINTS, BUNDLE, *last)):
            self._send(name)
        is_new = newest >= 0 and newest not in self._there
        if is_new and upload_checkpoint(
            self._remote, newest, self._folder, KEPT, self._contents, check_owner=self._check_owner
        ):
            self._there.add(newest)
        if ended:
            for name in self._changed(without=(CHECKPOINTS,)):
                self._send(name)

    def _send(self, name: str) -> None:
        before = _version(self._folder / name)
        with suppress(FileNotFoundError):
            self._remote.upload(self._folder / name, name)
            self._uploaded[name] = before

    def _changed(self, *, without: tuple[str, ...]) -> list[str]:
        """Names of files to upload, run.json last."""
        found = (file.relative_to(self._folder) for file in sorted(self._folder.rglob("*")) if file.is_file())
        names = [
            str(file)
            for file in found
            if file.parts[0] not in (OWNER, *without) and not any(part.startswith(".") for part in file.parts)
        ]
        names.sort(key=lambda name: (name == RUN_FILE, name == f"{BUNDLE}/{MANIFEST}", name))
        return [name for name in names if self._uploaded.get(name) != _version(self._folder / name)]

    def _left(self) -> list[str]:
        newest = newest_step(self._folder)
        checkpoint = [f"the checkpoint of step {newest:,}"] if newest >= 0 and newest not in self._there else []
        changed = self._changed(without=(CHECKPOINTS,))
        files = [name for name in changed if not name.startswith(f"{BUNDLE}/")]
        return checkpoint + ["the bundle"] * (len(files) < len(changed)) + files


def upload_rest(place: RunPlace) -> None:
    """Upload what an earlier command could not, of a finished run. Its run.json is uploaded last.

    Raises:
        StorageError: The URL cannot be written.
        TrainError: Something could not be uploaded.
    """
    if place.remote is not None and place.remote.read(RUN_FILE) != (place.folder / RUN_FILE).read_bytes():
        with RunUploads(place):
            pass


def check_shared(folder: Path, world: World) -> None:
    """Check that all processes see the local copy of a run at a URL. A collective call.

    Raises:
        TrainError: Some do not.
    """
    (token,) = world.broadcast_on_host([float(secrets.randbits(32))])
    mark = folder / f".shared-{int(token):08x}"
    if world.is_rank_zero:
        mark.touch()
    world.sum_on_host(0.0)
    unseen = world.sum_on_host(float(not mark.exists()))[0]
    if world.is_rank_zero:
        mark.unlink()
    if unseen:
        raise TrainError(
            f"--out is a URL, and {unseen:.0f} of {world.size} processes do not see its local copy {folder}; set "
            f"PENSTOCK_CACHE to a folder that all machines share, or give an --out that they share."
        )


def _version(file: Path) -> tuple[int, int]:
    with suppress(FileNotFoundError):
        found = file.stat()
        return found.st_size, found.st_mtime_ns
    return 0, 0
