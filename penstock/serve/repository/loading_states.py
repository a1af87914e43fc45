"""States of models while they are loaded, or loaded again after their last engine died."""

import time
from typing import final

from penstock.core.errors import PenstockError, UnknownRoute
from penstock.serve.messages import MAX_TEXT, RESTARTING
from penstock.serve.repository.fatal_loads import FatalLoads
from penstock.serve.repository.loaded_models import Key, LoadedModel, LoadedModels
from penstock.serve.repository.model_directory import ModelFolder
from penstock.serve.repository.model_states import ModelStates


@final
class LoadingStates:
    """Publishes what is done to load a model that no engine serves, and why it failed.

    Args:
        states: States of the models.
        models: What is served.
        fatal: Says which models are left out.
    """

    def __init__(self, states: ModelStates, models: LoadedModels, fatal: FatalLoads) -> None:
        self._states = states
        self._models = models
        self._fatal = fatal

    def note_step(self, folder: ModelFolder, activity: str) -> None:
        """Publish a step of a load, or of the export before it.

        Args:
            folder: The model.
            activity: The present step.
        """
        model = self._models.get(folder.key)
        if not self._models.versions_of(folder.name):
            self._states.set(folder.key, "LOADING", activity, since_ns=time.monotonic_ns())
        elif model is not None and not model.replicas:
            reason = f"{self._restarting(model)}{activity}"
            self._states.set(folder.key, "LOADING", reason, since_ns=time.monotonic_ns())

    def note_restored(self, model: LoadedModel, activity: str) -> None:
        """Publish a step of an export for an engine that was restarted.

        Args:
            model: The model.
            activity: The present step.
        """
        # It may have been replaced or unloaded while its network is exported.
        if self._models.get(model.folder.key) is model:
            self.note_step(model.folder, activity)

    def note_lost(self, model: LoadedModel) -> None:
        """Publish that the last engine of a model died."""
        if not self._fatal.left_s(model.number):
            self._states.set(model.folder.key, "LOADING", RESTARTING)

    def note_unrestored(self, model: LoadedModel, error: PenstockError) -> None:
        """Publish why an engine that was restarted cannot serve a model."""
        if not model.replicas and not self._fatal.left_s(model.number):
            self._states.set(model.folder.key, "LOADING", f"{self._restarting(model)}{error}")

    def note_ready(self, model: LoadedModel) -> None:
        """Publish that a model is served."""
        self._states.set(model.folder.key, "READY")

    def end(self, name: str, error: PenstockError) -> None:
        """End the states of versions that were exported for a load that did not come to them.

        Args:
            name: The model.
            error: Why its load failed.
        """
        for key in self._states.loading(name):
            if isinstance(error, UnknownRoute):
                # It was removed meanwhile.
                self.withdraw(key)
            elif self._models.get(key) is None:
                self._states.set(key, "UNAVAILABLE", str(error)[:MAX_TEXT])

    def withdraw(self, key: Key) -> None:
        """Withdraw the state of a version that is no more, or was loaded under another name, see `--app`."""
        if self._models.get(key) is None:
            self._states.withdraw(key)

    def _restarting(self, model: LoadedModel) -> str:
        # A server is ready without a model that was left out.
        return "" if self._fatal.was_left_out(model.number) else f"{RESTARTING}: "
