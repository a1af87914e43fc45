"""A job that an engine starts: a record in a folder that every machine sees, with the application's sources beside it.

FOLDER/TOKEN/job.json       the record; of scoring, tasks end where it is gone
FOLDER/TOKEN/sources.zip    the application's files
FOLDER/TOKEN/units.json     of scoring, the planned run
FOLDER/TOKEN/ended.txt      of scoring on Ray, why a process has ended itself
FOLDER/TOKEN/job.log        what a job of Slurm prints, which lives on without the command
"""

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, final

from penstock.core.errors import ClusterError
from penstock.core.machine.version import __version__
from penstock.core.source_files.find_application import FoundApplication, reference_parts

JOB, SOURCES, UNITS, LOG = "job.json", "sources.zip", "units.json", "job.log"
# Fixed, so that the same sources have the same hash.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """One command, to be run by several processes of a cluster.

    Args:
        token: Equal for all starts of this command.
        command: The command of Penstock, `"train"` or `"score"`.
        arguments: Arguments of `penstock` in each process of a training.
        size: The number of processes.
        device: Their device.
        cores: CPU cores of each.
        working_folder: Their working folder, where it exists.
        environment: Variables of each rank of a training, beside those of its machine.
        paths: Files and folders beside the record that every machine must see.
        application: The file that declares the application; empty if it is found by its import path.
        sources: SHA-256 of each of the application's files, by its path relative to that one's folder.
        archive_sha256: SHA-256 of `sources.zip`; empty without one.
        version: Penstock's version.
    """

    token: str
    command: Literal["train", "score"] = "train"
    arguments: Sequence[str] = ()
    size: int
    device: Literal["cpu", "cuda"]
    cores: int
    working_folder: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    paths: Sequence[str] = ()
    application: str = ""
    sources: Mapping[str, str]
    archive_sha256: str = ""
    version: str = __version__

    def write(self, folder: Path, found: FoundApplication) -> Path:
        """Write the job for an application, with its sources; return the file of the record.

        Args:
            folder: A folder that every machine sees.
            found: The application.

        Raises:
            ClusterError: The folder cannot be written.
        """
        place, job = folder / self.token, self
        try:
            place.mkdir(parents=True)
            if "/" in found.reference:
                archive = _archive(found.sources())
                (place / SOURCES).write_bytes(archive)
                job = replace(
                    self,
                    application=reference_parts(found.reference)[0],
                    sources=found.source_sha256(),
                    archive_sha256=hashlib.sha256(archive).hexdigest(),
                )
            beside = place / f".{JOB}"
            beside.write_text(json.dumps(asdict(job), indent=2) + "\n")
            return beside.rename(place / JOB)
        except OSError as error:
            raise ClusterError(
                f"{place} cannot be written ({error.strerror or error}); free disk space or give another --out."
            ) from None

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a job that `write` wrote.

        Raises:
            ClusterError: Its version of Penstock is another one.
        """
        fields: dict[str, Any] = json.loads(file.read_bytes())
        if fields.get("version") != __version__:
            raise ClusterError(
                f"this machine has Penstock {__version__}, and the command was given by {fields.get('version')}; "
                f"install the same version on all machines."
            )
        return cls(**fields)

    @staticmethod
    def remove_others(folder: Path) -> int:
        """Remove the files of jobs whose commands were killed; return their number. What is left of such a job ends."""
        others = [each for each in folder.glob("*") if each.is_dir()]
        for each in others:
            shutil.rmtree(each, ignore_errors=True)
        return len(others)

    def remove(self, folder: Path) -> None:
        """Remove the files of a job that has ended."""
        shutil.rmtree(folder / self.token, ignore_errors=True)


def unpack_sources(job: ClusterJob, file: Path, to: Path) -> Path | None:
    """Unpack the application's sources where this machine does not have them in their own place.

    Args:
        job: The job.
        file: The file of its record.
        to: An empty folder.

    Returns:
        The file that declares the application, in `to`; None if the one in its own place is to be used.

    Raises:
        ClusterError: The archive is not the one that was written.
    """
    if not job.application or _has(Path(job.application), job.sources):
        return None
    archive = file.with_name(SOURCES)
    try:
        data = archive.read_bytes()
    except OSError as error:
        raise ClusterError(f"{archive} cannot be read ({error.strerror or error}); give the command again.") from None
    if hashlib.sha256(data).hexdigest() != job.archive_sha256:
        raise ClusterError(f"{archive} is damaged; give the command again.")
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        packed.extractall(to)
    return to / Path(job.application).name


def _archive(sources: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(sources.items()):
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _has(home: Path, sources: Mapping[str, str]) -> bool:
    try:
        return all(
            hashlib.sha256((home.parent / name).read_bytes()).hexdigest() == digest for name, digest in sources.items()
        )
    except OSError:
        return False
