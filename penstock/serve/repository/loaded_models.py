"""The versions of models that a server serves, with their replicas."""

import asyncio
from dataclasses import dataclass
from typing import final

from penstock.serve.repository.model_directory import ModelFolder
from penstock.serve.repository.replica_loads import Replicas

# Name and version of a model.
Key = tuple[str, str]


@final
@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """A version of a model that is served, or was until its last engine died.

    Args:
        folder: Its folder, with the name that requests use.
        number: Identifies this version, see `LoadModel.model`.
        replicas: By engine.
        keys: Keys of its tables; of the last ones where no engine is left.
        loaded_ns: Monotonic time at which it was loaded.
        pinned: Folder of its copies, see `LoadModel.pinned`.
    """

    folder: ModelFolder
    number: int
    replicas: Replicas
    keys: list[int]
    loaded_ns: int
    pinned: str


@final
class LoadedModels:
    """The versions that are served, or were until their last engine died.

    Attributes:
        change_lock: Held during each change of them.
    """

    def __init__(self) -> None:
        self.change_lock = asyncio.Lock()
        self._models: dict[Key, LoadedModel] = {}

    @property
    def all(self) -> tuple[LoadedModel, ...]:
        """All versions of all models."""
        return tuple(self._models.values())

    def get(self, key: Key) -> LoadedModel | None:
        """Return a version; None if it is not served."""
        return self._models.get(key)

    def of_number(self, number: int) -> LoadedModel | None:
        """Return the version of a number, see `LoadModel.model`; None if it is not served."""
        return next((model for model in self._models.values() if model.number == number), None)

    def versions_of(self, name: str) -> list[LoadedModel]:
        """List the versions of a model."""
        return [model for model in self._models.values() if model.folder.name == name]

    def put(self, model: LoadedModel) -> None:
        """Serve a version, in the place of the one that has its name and version."""
        self._models[model.folder.key] = model

    def remove(self, model: LoadedModel) -> None:
        """Serve a version no more."""
        del self._models[model.folder.key]
