"""The folder in the cache that keeps what was found out about a bundle on a GPU: its way to run, compiled batches."""

import fcntl
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.core.bundles.bundle import BundleFiles
from penstock.core.machine.version import __version__
from penstock.core.source_files.find_application import FoundApplication
from penstock.runtime.gpu.fold_norms import Fold
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.gpu.rewrite_graph import REVISION

log = logging.getLogger(__name__)

REFUSED = ".refused"
FOLDS = "folds.json"


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
    versions = f"torch{torch.__version__}-{__version__}-{REVISION}".replace("+", "-")
    return cache / "gpu" / f"{files.manifest.content_hash[:32]}-{sources[:8]}-{versions}-{chip}-{index}"


def compiled_file(place: Path, way: GpuWay, rows: int) -> Path:
    """Return the file of a compiled batch size."""
    layout = "-channels-last" if way.channels_last else ""
    return place / f"{way.precision}-{way.weights}{layout}-{rows}.compiled"


def compiled_shape_file(place: Path, way: GpuWay, shape: tuple[int, ...]) -> Path:
    """Return the file of a compiled shape, of so many rows and rooms."""
    layout = "-channels-last" if way.channels_last else ""
    return place / f"{way.precision}-{way.weights}{layout}-shape-{shape_name(shape)}.compiled"


def shape_name(shape: tuple[int, ...]) -> str:
    """Return `"8x128"` for 8 rows with room for 128."""
    return "x".join(map(str, shape))


def refusal(file: Path) -> str:
    """Return why a batch size cannot be compiled, as remembered; empty where that is not known."""
    try:
        return file.with_suffix(REFUSED).read_text(errors="replace")
    except OSError:
        return ""


def refuse(file: Path, reason: str) -> None:
    """Remember that a batch size cannot be compiled."""
    file.with_suffix(REFUSED).write_text(reason)


def remembered_folds(place: Path) -> list[Fold] | None:
    """Return the batch norms that were folded before; None where that is not known."""
    try:
        return [Fold(convolution, norm) for convolution, norm in json.loads((place / FOLDS).read_text())]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read: %s", place / FOLDS, error)
        return None


def remember_folds(place: Path, folds: list[Fold]) -> None:
    """Remember the batch norms that are folded."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another server may read it.
        beside = place / f".{FOLDS}-{secrets.token_hex(4)}"
        beside.write_text(json.dumps(folds) + "\n")
        beside.replace(place / FOLDS)
    except OSError as error:
        log.warning("the cache %s cannot be written (%s): the next start looks for batch norms again", place, error)


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
