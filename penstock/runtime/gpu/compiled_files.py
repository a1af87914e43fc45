"""The folder in the cache that keeps what was found out about a bundle on a GPU: its way to run, compiled batches."""

import fcntl
import hashlib
import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.core.bundle import BundleFiles
from penstock.core.find_application import FoundApplication
from penstock.core.version import __version__
from penstock.runtime.gpu.precision import GpuWay

log = logging.getLogger(__name__)

REFUSED = ".refused"


def gpu_place(files: BundleFiles, found: FoundApplication, cache: Path, device: str) -> Path:
    """Return the folder of a bundle for a GPU and the present versions.

    Args:
        files: The bundle.
        found: Its application, whose sources may have changed.
        cache: The cache.
        device: torch's name of the device; compiled code names its index.
    """
    index = torch.device(device).index or 0
    sources = hashlib.sha256(repr(sorted(found.source_sha256().items())).encode()).hexdigest()
    chip = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(index))
    versions = f"torch{torch.__version__}-{__version__}".replace("+", "-")
    return cache / "gpu" / f"{files.manifest.content_hash[:32]}-{sources[:8]}-{versions}-{chip}-{index}"


def compiled_file(place: Path, way: GpuWay, rows: int) -> Path:
    """Return the file of a compiled batch size."""
    layout = "-channels-last" if way.channels_last else ""
    return place / f"{way.precision}-{way.weights}{layout}-{rows}.compiled"


def refusal(file: Path) -> str:
    """Return why a batch size cannot be compiled, as remembered; empty where that is not known."""
    try:
        return file.with_suffix(REFUSED).read_text(errors="replace")
    except OSError:
        return ""


def refuse(file: Path, reason: str) -> None:
    """Remember that a batch size cannot be compiled."""
    file.with_suffix(REFUSED).write_text(reason)


@contextmanager
def compiling_alone(place: Path) -> Generator[None]:
    """Hold the lock of a folder: several servers may start at the same time."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "compile.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s is on a file system without locks: %s", place, error.strerror)
        yield
