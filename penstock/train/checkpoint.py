"""What a run needs to go on exactly: written beside and renamed, verified by hash, without pickle.

checkpoints/step-00000120/state.safetensors   every tensor, by its path: model/..., optimizer/state/3/momentum_buffer
checkpoints/step-00000120/state.json          everything else, and the SHA-256 of the tensors and of itself
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from penstock.core.errors import TrainError

KEPT = 2
_TENSORS, _VALUES = "state.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a run after a number of steps.

    Args:
        step: Steps taken. The cursor, the learning rate and all chance follow from it.
        state: State dicts by name; nested dicts and lists of tensors and JSON values.
    """

    step: int
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint beside its place, rename it there, and drop all but the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    values = _split(checkpoint.state, "", tensors)
    data = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
    fields = {"step": checkpoint.step, "state": values, "sha256": hashlib.sha256(data).hexdigest()}
    fields["seal"] = _seal(fields)
    place = folder / f"step-{checkpoint.step:08d}"
    # What a process that was killed while it wrote has left: one process writes a run.
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    beside = place.with_name(f".{place.name}-{os.getpid()}")
    beside.mkdir()
    for name, content in ((_TENSORS, data), (_VALUES, json.dumps(fields).encode())):
        with (beside / name).open("wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)
    for old in _places(folder)[:-KEPT]:
        shutil.rmtree(old)
    return place


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, or None where it has none yet.

    Raises:
        TrainError: It is damaged.
    """
    places = _places(folder)
    return read_checkpoint(places[-1]) if places else None


def read_checkpoint(place: Path) -> Checkpoint:
    """One checkpoint, verified.

    Raises:
        TrainError: A file is missing or altered.
    """
    try:
        fields = json.loads((place / _VALUES).read_bytes())
        data = (place / _TENSORS).read_bytes()
        whole = fields.pop("seal") == _seal(fields) and fields["sha256"] == hashlib.sha256(data).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(
            f"a checkpoint cannot be read ({error}); remove {place} to go on from the one before."
        ) from None
    if not whole:
        raise TrainError(f"a checkpoint is not as it was written; remove {place} to go on from the one before.")
    return Checkpoint(step=fields["step"], state=_join(fields["state"], load(data)))


def _seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _places(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        # JSON keys are text; an optimizer's state has whole numbers for keys.
        return {"items": [[key, _split(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_split(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TrainError(
        f"{path} holds a {type(value).__name__}, which a checkpoint cannot; keep tensors and plain values."
    )


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "items" in value:
        return {key: _join(item, tensors) for key, item in value["items"]}
    return [_join(item, tensors) for item in value["list"]]


def parameter_hash(module: torch.nn.Module) -> str:
    """The SHA-256 over the names and bytes of a network's parameters and buffers."""
    return state_hash(module.state_dict())


def state_hash(state: Mapping[str, Tensor]) -> str:
    """The SHA-256 over the names and bytes of a network's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
