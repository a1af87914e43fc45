"""Loads and imports of models during which the process that made them ended."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import final

from penstock.core.bundles.bundle import read_manifest
from penstock.core.errors import PenstockError
from penstock.serve.background import BackgroundTasks
from penstock.serve.control.bundle_trials import BundleTrials
from penstock.serve.control.child import ChildProcess
from penstock.serve.messages import LoadModel, ModelLoaded
from penstock.serve.pinned_content import pinned_bundle
from penstock.serve.repository.left_out_models import LeftOutModels


@final
class EndedLoads:
    """Refuses models that end the processes that load or import them, or whose loads do not end.

    Args:
        app: See `ModelSettings.app`.
        trials: Refuses the bundles.
        left_out: Leaves out the models, if they are served.
    """

    def __init__(self, app: str | None, trials: BundleTrials, left_out: LeftOutModels) -> None:
        self._app = app
        self._trials = trials
        self._left_out = left_out
        # What a front-end imports to attach it.
        self._importing: dict[ChildProcess, ModelLoaded] = {}
        self._refusing = BackgroundTasks()

    def begin_import(self, frontend: ChildProcess, loaded: ModelLoaded) -> None:
        """Note that a front-end imports an application.

        Args:
            frontend: The front-end.
            loaded: The table that it is to attach.
        """
        self._importing[frontend] = loaded

    def end_import(self, frontend: ChildProcess) -> None:
        """Note that a front-end imports nothing any more."""
        self._importing.pop(frontend, None)

    def give_up(self, command: LoadModel, reason: str) -> None:
        """Refuse a model whose load took too long.

        Args:
            command: The load.
            reason: What happened, as a sentence.
        """
        self._left_out.leave_out(command.model, reason)
        self._refuse(command, reason)

    def record_load(self, engine: ChildProcess, command: LoadModel) -> str:
        """Record that an engine ended while it loaded a model.

        Args:
            engine: The engine.
            command: The load.

        Returns:
            What happened, as a sentence.
        """
        return self._record(engine, command, "engine", "loaded", everywhere=False)

    def record_import(self, frontend: ChildProcess) -> tuple[int, str] | None:
        """Record that a front-end ended, which may have imported a model.

        Args:
            frontend: The front-end.

        Returns:
            Key of the table that no front-end is to attach, and what happened, as a sentence; None if there is none,
            since the front-end imported nothing, or SIGKILL ended it.
        """
        loaded = self._importing.pop(frontend, None)
        if loaded is None:
            return None
        reason = self._record(frontend, loaded.command, "front-end", "imported", everywhere=True)
        return None if _was_killed(frontend) else (loaded.command.key, reason)

    def _record(self, child: ChildProcess, command: LoadModel, role: str, what: str, *, everywhere: bool) -> str:
        killed = _was_killed(child)
        mend = "its log says why" if killed else "mend the application"
        name = _application_of(command) or self._app or "of the bundle"
        reason = f"the {role}'s process ended (status {child.exit_status}) while it {what} application {name}; {mend}."
        if not killed:
            self._refuse(command, reason)
        self._left_out.note_end(command.model, child.name, reason, killed=killed, everywhere=everywhere)
        return reason

    def _refuse(self, command: LoadModel, reason: str) -> None:
        self._refusing.start(self._trials.refuse(Path(command.bundle), reason))


def _was_killed(child: ChildProcess) -> bool:
    return child.exit_status == -signal.SIGKILL


def _application_of(command: LoadModel) -> str:
    """Name the application of a model, if its manifest can be read."""
    with suppress(PenstockError, OSError):
        return read_manifest(pinned_bundle(command.pinned, command.bundle)).reference
    return ""
