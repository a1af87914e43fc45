"""Checkpoints of a run at a URL: complete when their state.json is there, which is uploaded last and deleted first."""

import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.storage.remote_folder import RemoteFolder

CHECKPOINTS = "checkpoints"
# The file that completes a checkpoint.
VALUES = "state.json"
_STAGED = ".uploading"


def complete_steps(sizes: dict[str, int]) -> set[int]:
    """Return the steps of the complete checkpoints among the files of a run."""
    return {_step_of(name) for name in sizes if name.endswith(f"/{VALUES}")} - {-1}


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint in a local folder; -1 if there is none."""
    return max((_step_of(place.name) for place in (run / CHECKPOINTS).glob("step-*")), default=-1)


def download_checkpoint(remote: RemoteFolder, step: int, run: Path) -> Path:
    """Download a checkpoint into a local folder, where it is visible when it is complete.

    Raises:
        StorageError: It cannot be read.
    """
    name = _name_of(step)
    place = run / CHECKPOINTS / name
    beside = place.with_name(f".{name}-downloaded")
    if place.exists():
        return place
    shutil.rmtree(beside, ignore_errors=True)
    for path in remote.sizes(f"{CHECKPOINTS}/{name}"):
        remote.download(path, beside / path.rpartition("/")[2])
    beside.rename(place)
    return place


def upload_checkpoint(
    remote: RemoteFolder,
    step: int,
    run: Path,
    kept: int,
    contents: dict[str, str],
    *,
    check_owner: Callable[[], object] = lambda: None,
) -> bool:
    """Upload a checkpoint and remove old ones at the URL.

    What is in the checkpoint before it already, such as the best weights, is copied within the storage.

    Args:
        remote: The run at the URL.
        step: The checkpoint's step.
        run: The local folder.
        kept: Number of checkpoints to keep at the URL.
        contents: Names at the URL of the files of the checkpoint before it, by their SHA-256; updated.
        check_owner: Called before the file that completes the checkpoint; raises if another command owns the run now.

    Returns:
        False if a later checkpoint has replaced it here meanwhile.

    Raises:
        StorageError: It cannot be written.
    """
    with _staged(run, step) as staged:
        if staged is None:
            return False
        files: dict[str, dict[str, str]] = json.loads((staged / VALUES).read_bytes())["files"]
        here: dict[str, str] = {}
        for file in sorted(staged.iterdir(), key=lambda file: (file.name == VALUES, file.name)):
            if file.name == VALUES:
                check_owner()
            name, digest = f"{CHECKPOINTS}/{_name_of(step)}/{file.name}", files.get(file.name, {}).get("sha256", "")
            if digest not in contents or not remote.copy(contents[digest], name):
                remote.upload(file, name)
            here |= {digest: name} if digest else {}
    contents.clear()
    contents.update(here)
    sizes = remote.sizes(CHECKPOINTS)
    stays = {*sorted(complete_steps(sizes))[-kept:], step}
    old = [name for name in sizes if _step_of(name) not in stays]
    for name in sorted(old, key=lambda name: not name.endswith(f"/{VALUES}")):
        remote.delete(name)
    return True


def _name_of(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(name: str) -> int:
    """Step of a checkpoint's folder or file, by its path; -1 for another file."""
    step = next((part for part in name.split("/") if part.startswith("step-")), "")
    return int(step[5:]) if step[5:].isdigit() else -1


@contextmanager
def _staged(run: Path, step: int) -> Generator[Path | None]:
    """Hard links of a checkpoint, which stay when later ones replace it; None if it was replaced already."""
    staged = run / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        try:
            for file in (run / CHECKPOINTS / _name_of(step)).iterdir():
                _link(file, staged / file.name)
        except FileNotFoundError:
            yield None
            return
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without hard links.
        shutil.copyfile(file, link)
