"""The place of a run: a folder, or a URL with a local copy.

CACHE/runs/HASH/NAME/   the local copy of the run URL/NAME; HASH is of the URL
URL/NAME/owner.json     the run's id, and the token of the command that trains it now
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from penstock.core.errors import StorageError, TrainError
from penstock.core.remote.cache_variables import cache_folder, expanded_cache
from penstock.core.storage.remote_folder import HUB, RemoteFolder, one_at_a_time, url_of
from penstock.train.checkpoint.remote_checkpoints import (
    CHECKPOINTS,
    complete_steps,
    download_checkpoint,
    newest_step,
)
from penstock.train.report.run_log import METRICS_FILE, RUN_FILE
from penstock.train.run_owner import refuse_owned

log = logging.getLogger(__name__)

OWNER = "owner.json"
BUNDLE = "bundle"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """The place of a run.

    Args:
        folder: Its folder, or for a run at a URL its local copy.
        remote: The folder at the URL; None for a local run.
    """

    folder: Path
    remote: RemoteFolder | None = None

    @classmethod
    def of(cls, place: str | Path, cache: str | Path | None = None) -> Self:
        """Return the place that an argument names.

        Args:
            place: A folder or a URL.
            cache: The folder of local copies of what is at URLs; by default `cache_folder()`.

        Raises:
            StorageError: The URL is of no known kind, or its package is not installed; or the home folder with the
                cache is not known.
        """
        url = url_of(place)
        if url is None:
            return cls(folder=Path(place))
        if url.startswith(f"{HUB}:"):
            raise StorageError(
                f"{url} is a repository, which takes whole commits; train to a folder or a bucket, and 'penstock push "
                f"RUN/bundle {url}'."
            )
        remote = RemoteFolder(url)
        key = hashlib.sha256(url.encode()).hexdigest()[:16]
        root = expanded_cache(cache) if cache else cache_folder()
        return cls(folder=root / "runs" / key / (remote.name or "run"), remote=remote)

    def __str__(self) -> str:
        return str(self.folder if self.remote is None else self.remote)

    @property
    def bundle(self) -> str:
        """The place of the run's bundle."""
        return f"{self}/{BUNDLE}"

    def fetch(self) -> None:
        """Bring the records of a run at a URL here, unless this machine's copy is of the same run and as far.

        Raises:
            StorageError: The URL cannot be read.
            TrainError: Another command trains in the local copy.
        """
        if self.remote is None:
            return
        sizes = self.remote.sizes()
        here, there = owner_of(_read(self.folder / OWNER)), owner_of(self.remote.read(OWNER))
        same = here is not None and there is not None and here["run"] == there["run"]
        with one_at_a_time(self.folder):
            if same and newest_step(self.folder) >= max(complete_steps(sizes), default=-1):
                return
            refuse_owned(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
            if RUN_FILE not in sizes:
                return
            for name in sizes:
                if not name.startswith((f"{CHECKPOINTS}/", f"{BUNDLE}/")):
                    self.remote.download(name, self.folder / name)

    def fetch_checkpoint(self, step: int | None = None) -> None:
        """Bring a checkpoint here, verified, unless a newer one is.

        A damaged one is stepped over to the one before, with a warning, unless its step is given.

        Args:
            step: Its step; by default the newest.

        Raises:
            StorageError: It cannot be read.
            TrainError: It is damaged, or there is no such checkpoint.
        """
        if self.remote is None:
            return
        sizes = self.remote.sizes()
        # The records of a run are uploaded before its checkpoints.
        steps = complete_steps(sizes) if RUN_FILE in sizes else set[int]()
        if step is not None and step not in steps:
            known = ", ".join(map(str, sorted(steps))) or "none yet"
            raise TrainError(f"{self} has no checkpoint of step {step:,}; its checkpoints: {known}.")
        with one_at_a_time(self.folder):
            damaged: TrainError | None = None
            for wanted in sorted(steps, reverse=True) if step is None else [step]:
                if step is None and wanted <= newest_step(self.folder):
                    return
                wrong = self._download_verified(wanted)
                if wrong is None:
                    return
                damaged = damaged or wrong
                log.warning("%s", wrong)
            if damaged is not None:
                raise damaged

    def _download_verified(self, step: int) -> TrainError | None:
        assert self.remote is not None, self
        place = download_checkpoint(self.remote, step, self.folder)
        # Imports torch, which the launcher of several processes does not need.
        from penstock.train.checkpoint.format import read_checkpoint

        try:
            read_checkpoint(place)
        except TrainError as error:
            shutil.rmtree(place)
            there = f"{self.remote}/{CHECKPOINTS}/{place.name}"
            return TrainError(str(error).replace(str(place), there))
        return None

    def beside(self, cache: Path) -> "RunPlace":
        """Return the first of `run-2`, `run-3` and so on without a run.

        Args:
            cache: The folder of local copies.

        Raises:
            StorageError: The URL cannot be read.
        """
        number = 2
        while True:
            made = RunPlace.of(f"{self.remote}-{number}", cache)
            assert made.remote is not None, made
            if made.remote.read(RUN_FILE) is None:
                made.fetch()
                return made
            number += 1


def fetch_records(remote: RemoteFolder, to: Path) -> None:
    """Download run.json and the metrics of all runs at a URL or below it.

    Raises:
        StorageError: The URL cannot be read.
        TrainError: There is no run.
    """
    sizes = remote.sizes()
    runs = [name.removesuffix(RUN_FILE) for name in sizes if name.rpartition("/")[2] == RUN_FILE]
    if not runs:
        raise TrainError(
            f"there is no run in {remote} or below it; 'penstock train APP --out {remote}/NAME' makes one."
        )
    for name in sizes:
        if name.rpartition("/")[2] in (RUN_FILE, METRICS_FILE) and name[: name.rfind("/") + 1] in runs:
            remote.download(name, to / name)


def owner_of(data: bytes | None) -> dict[str, Any] | None:
    """Parse an owner.json; None if it is none."""
    try:
        owner = json.loads(data or b"")
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and "run" in owner else None


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
