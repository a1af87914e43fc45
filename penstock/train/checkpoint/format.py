"""Checkpoint format: written to a temporary folder and renamed, verified by hash, without pickle.

checkpoints/step-00000120/state-00003.safetensors   the tensors of the state that rank 3 writes
checkpoints/step-00000120/best-00003.safetensors    the best weights that rank 3 writes
checkpoints/step-00000120/state.json                values that are not tensors; the shape, slices and files of each
                                                    tensor; the SHA-256 of every file and of itself
checkpoints/.step-00000120-5eed/                    a checkpoint being written
checkpoints/.step-00000120-5eed/written-00003.json  rank 3 has written its files
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.errors import TrainError
from penstock.core.storage.atomic_write import sync, write_through
from penstock.train.checkpoint.lazy_tensors import CheckpointFiles, StoredTensor
from penstock.train.checkpoint.snapshot import SlicedTensor, writers_of
from penstock.train.parallel.world import World

log = logging.getLogger(__name__)

KEPT = 2
FORMAT = 2
POLL_S = 0.02
CHUNK_BYTES = 1 << 24
_VALUES = "state.json"
_UNREADABLE, _OTHER_FORMAT = "cannot be read", "is of format"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a run after a number of steps.

    Args:
        step: Steps taken. The sampler's cursor, the learning rate and all RNG seeds follow from it.
        state: State dicts by name: nested dicts and lists of `StoredTensor` and JSON values.
    """

    step: int
    state: dict[str, Any]


@final
class CheckpointDamaged(TrainError):
    """A checkpoint is not as it was written.

    Args:
        place: Its folder.
        reason: What is wrong with its files.
    """

    def __init__(self, place: Path, reason: str) -> None:
        self.reason = f"the checkpoint {place} is not as it was written: {reason}"
        super().__init__(f"{self.reason}; remove {place} to go on from the one before.")


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def file_of(group: str, rank: int) -> str:
    """Name a process's file."""
    return f"{group}-{rank:05d}.safetensors"


def manifest_of(step: int, values: Any, groups: Mapping[str, Mapping[str, SlicedTensor]], size: int) -> dict[str, Any]:
    """Make the manifest of a checkpoint, without the hashes.

    Args:
        step: Steps taken.
        values: The state, with paths in place of tensors.
        groups: The tensors, by file group and path.
        size: The number of processes.
    """
    tensors: dict[str, Any] = {}
    for group, parts in groups.items():
        kept_by = writers_of(parts, size)
        for path, part in parts.items():
            tensors[path] = {
                "shape": list(part.shape),
                "dim": part.slices.dim if part.slices else 0,
                "sizes": list(part.slices.sizes) if part.slices else None,
                "files": [file_of(group, rank) for rank in kept_by[path]],
            }
    return {"format": FORMAT, "step": step, "processes": size, "state": values, "tensors": tensors}


def write_blocks(file: Path, blocks: memoryview, size: int) -> dict[str, Any]:
    """Write a large file with direct I/O, where the file system supports it.

    Filling the page cache costs more CPU time than hashing, and evicts the examples that are read again.

    Args:
        file: The file to write.
        blocks: The padded content; address and length are multiples of `BLOCK_BYTES`.
        size: Bytes of the content.

    Returns:
        Its size in bytes and its SHA-256.
    """
    digest = hashlib.sha256()
    with file.open("wb", buffering=0) as sink:
        with suppress(OSError):
            _direct(sink.fileno(), True)
        for first in range(0, len(blocks), CHUNK_BYTES):
            chunk = blocks[first : first + CHUNK_BYTES]
            digest.update(chunk[: size - first])
            while len(chunk):
                try:
                    chunk = chunk[os.write(sink.fileno(), chunk) :]
                except OSError as error:
                    # The file system needs other block sizes, or cannot read this memory.
                    refused = error.errno in (errno.EINVAL, errno.EFAULT)
                    if not refused or not _direct(sink.fileno(), False):
                        raise
        sink.truncate(size)
        os.fsync(sink.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _direct(descriptor: int, on: bool) -> bool:
    """Turn direct I/O on or off, where the system has it (Linux); return True if that changed it."""
    direct = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | direct if on else before & ~direct
    fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    return after != before


def mark_written(beside: Path, rank: int, files: Mapping[str, Any]) -> None:
    """Record that a process has written its files."""
    name = f"written-{rank:05d}.json"
    write_through(beside / f".{name}", json.dumps(files).encode())
    (beside / f".{name}").rename(beside / name)


def publish(
    beside: Path,
    place: Path,
    manifest: Mapping[str, Any],
    given_up: threading.Event,
    check_owner: Callable[[], object] = lambda: None,
) -> bool:
    """Wait for the files of all processes, rename the checkpoint, and remove all but the newest two.

    Args:
        beside: The folder it was written in.
        place: The folder to rename it to.
        manifest: The result of `manifest_of`.
        given_up: Set when files are missing for good.
        check_owner: Called before the rename; raises if the checkpoint may not be named, see `run_owner`.

    Returns:
        True if it was renamed.
    """
    files: dict[str, Any] = {}
    for rank in range(manifest["processes"]):
        written = beside / f"written-{rank:05d}.json"
        while not written.exists():
            # Raises if the folder is gone.
            beside.stat()
            if given_up.wait(POLL_S):
                return False
        files |= json.loads(written.read_bytes())
        written.unlink()
    fields = {**manifest, "files": files}
    write_through(beside / _VALUES, json.dumps({**fields, "seal": _seal(fields)}).encode())
    sync(beside)
    check_owner()
    _drop(place)
    beside.rename(place)
    sync(place.parent)
    for old in checkpoint_places(place.parent)[:-KEPT]:
        _drop(old)
    return True


def newest_checkpoint(folder: Path, world: World | None = None, *, set_aside: bool = False) -> Checkpoint | None:
    """Read and verify the newest checkpoint of a run; None if there is none. A collective call.

    Each process verifies some of the files. A damaged checkpoint is stepped over to the one before, with a warning.

    Args:
        folder: The folder of the checkpoints.
        world: The processes.
        set_aside: Rename damaged ones, as the owner of the run may, so that they do not count as kept.

    Raises:
        TrainError: All are damaged, one cannot be read, or the processes see different checkpoints.
    """
    world = world or World()
    places = checkpoint_places(folder)
    step = int(places[-1].name.removeprefix("step-")) if places else -1
    (first,) = world.broadcast_on_host([step])
    if world.sum_on_host(step != first)[0]:
        raise TrainError(
            "the processes see different checkpoints; put the run's folder on a file system that all of them share."
        )
    damaged: list[tuple[Path, CheckpointDamaged]] = []
    for place in reversed(places):
        try:
            found = read_checkpoint(place, world)
        except CheckpointDamaged as error:
            damaged.append((place, error))
            continue
        for wrong, error in damaged if world.is_rank_zero else ():
            log.warning("%s; the run goes on from the one before, of step %d", error.reason, found.step)
            if set_aside:
                _set_aside(wrong)
        return found
    if damaged:
        error = damaged[0][1]
        raise TrainError(f"{error.reason}, and there is no whole one before it; begin a new run with another --out.")
    return None


def read_checkpoint(place: Path, world: World | None = None) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointDamaged: A file is missing or altered.
        TrainError: A file cannot be read, or is of another version.
    """
    world = world or World()
    fields, wrong = _manifest(place)
    if fields is not None:
        own = sorted(fields["files"])[world.rank :: world.size]
        wrong = [said for name in own if (said := _wrong_with(place / name, fields["files"][name]))]
    # All processes must fail together.
    found = sorted(world.sum_counts(dict.fromkeys(wrong, 1)))
    if found or fields is None:
        reason = ", ".join(found)
        # Only what will never be whole again is stepped over.
        if any(_UNREADABLE in said or _OTHER_FORMAT in said for said in found):
            raise TrainError(f"the checkpoint {place} cannot be used: {reason}; repair the folder, or remove it.")
        raise CheckpointDamaged(place, reason)
    files = CheckpointFiles(place)
    tensors = {
        path: StoredTensor(
            at=files,
            path=path,
            shape=tuple(tensor["shape"]),
            dim=tensor["dim"],
            sizes=tuple(tensor["sizes"] or tensor["shape"][:1]),
            files=tuple(tensor["files"]),
        )
        for path, tensor in fields["tensors"].items()
    }
    return Checkpoint(step=fields["step"], state=_join(fields["state"], tensors))


def _manifest(place: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Read the manifest; on failure return None and the reasons."""
    try:
        fields = json.loads((place / _VALUES).read_bytes())
        written_as = fields.get("format", 1)
        if written_as != FORMAT:
            return None, [f"{_VALUES} {_OTHER_FORMAT} {written_as}, and this version of Penstock reads {FORMAT}"]
        whole = fields.pop("seal") == _seal(fields)
    except FileNotFoundError:
        return None, [f"{_VALUES} is missing"]
    except OSError as error:
        return None, [f"{_VALUES} {_UNREADABLE} ({error.strerror})"]
    except (ValueError, KeyError, AttributeError):
        whole, fields = False, None
    return (fields, []) if whole else (None, [f"{_VALUES} is altered"])


def _wrong_with(file: Path, fields: Mapping[str, Any]) -> str | None:
    try:
        if file.stat().st_size != fields["bytes"]:
            return f"{file.name} has {file.stat().st_size:,} bytes of {fields['bytes']:,}"
        with file.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} {_UNREADABLE} ({error.strerror})"
    return None if found == fields["sha256"] else f"{file.name} is altered"


def _seal(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _set_aside(place: Path) -> None:
    """Keep the last damaged checkpoint under a name that no reader takes for one."""
    for old in place.parent.glob(".damaged-*"):
        shutil.rmtree(old, ignore_errors=True)
    place.rename(place.with_name(f".damaged-{place.name}"))


def _drop(place: Path) -> None:
    """Remove a checkpoint, renamed first so that no reader finds half of it."""
    if place.exists():
        left = place.with_name(f".{place.name}-dropped")
        shutil.rmtree(left, ignore_errors=True)
        place.rename(left)
        shutil.rmtree(left)


def checkpoint_places(folder: Path) -> list[Path]:
    """Return the folders of the checkpoints in a folder, oldest first."""
    return sorted(place for place in folder.glob("step-*") if place.name.removeprefix("step-").isdigit())


def _join(value: Any, tensors: Mapping[str, StoredTensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "items" in value:
        return {key: _join(item, tensors) for key, item in value["items"]}
    return [_join(item, tensors) for item in value["list"]]


def parameter_hash(module: torch.nn.Module) -> str:
    """Compute the SHA-256 over the names and bytes of a network's parameters and buffers."""
    return state_hash(module.state_dict())


def state_hash(state: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 over the names and bytes of a state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
