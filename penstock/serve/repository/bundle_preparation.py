"""Preparation of a bundle before engines load it: its trial and its export, beside the changes of what is served."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, final

from penstock.core.bundles.bundle_application import ComparedSources
from penstock.core.errors import ServeError
from penstock.serve.pinned_content import pinned_bundle, reference_of

# Tries the bundle in a folder, see `BundleTrials.check`.
Trial = Callable[[Path, ComparedSources | None], Awaitable[ComparedSources | None]]
# Sources of bundles that were tried, by their folders.
SourcesByBundle = dict[Path, ComparedSources]
# Takes each step of an export.
Report = Callable[[str], None]

# Why an engine has no graph of a network that was exported, or not known to need it, before its load.
NO_GRAPH = "its exported graph is not in the cache any more, or cannot be read; load the model again"
# Longest reason in a command.
MAX_REASON = 1000


@final
class RememberedFailure(ServeError):
    """A bundle could not be used a moment ago, and is not tried again yet.

    Args:
        reason: Why it could not be used.
        left_s: Time until it is tried again, in seconds.
    """

    def __init__(self, reason: str, left_s: float) -> None:
        super().__init__(f"{reason.rstrip('.')} (remembered; it is tried again in {math.ceil(left_s)} s).")
        self.reason = reason


class Exports(Protocol):
    """Exports networks to ONNX before engines load them, see `NetworkExports`."""

    async def is_needed(self, bundle: Path) -> bool:
        """Tell whether an engine would export the network of a bundle."""
        ...

    async def export(self, bundle: Path, app: str, report: Report) -> str:
        """Export the network of a bundle; returns why there is no graph, empty if there is."""
        ...


@final
class BundlePreparation:
    """Tries bundles, and exports their networks.

    Args:
        trial: Tries a bundle, see `BundleTrials.check`; None tries none.
        exports: Exports networks, but for those of the start; None leaves it to the engines.
    """

    def __init__(self, trial: Trial | None = None, exports: Exports | None = None) -> None:
        self._trial, self._exports = trial, exports
        # Why the network of a bundle was not exported, by its folder, until it is.
        self._unexported: dict[Path, str] = {}

    async def check(self, bundle: Path, before: ComparedSources | None = None) -> ComparedSources | None:
        """Try a bundle.

        Args:
            bundle: Its folder.
            before: What an earlier call returned.

        Returns:
            The sources that were compared; None without a trial.

        Raises:
            PenstockError: It cannot be loaded.
        """
        if self._trial is None:
            return None
        try:
            return await self._trial(bundle, before)
        except OSError as error:
            raise ServeError(f"{bundle} cannot be tried ({error.strerror or error}); try again.") from error

    async def prepare(self, bundle: Path, report: Report) -> ComparedSources | None:
        """Try a bundle, and export its network where an engine would.

        Args:
            bundle: Its folder.
            report: Called with each step of the export.

        Returns:
            See `check`.

        Raises:
            PenstockError: It cannot be loaded.
        """
        compared = await self.check(bundle)
        if self._exports is not None and await self._exports.is_needed(bundle):
            await self._export(self._exports, bundle, "", report)
            # The engine makes a network that could not be exported, which was not tried before.
            compared = await self.check(bundle, compared)
        return compared

    async def find_export(self, bundle: Path, pinned: str, report: Report) -> Coroutine[Any, Any, None] | None:
        """Return the export of a model that is to be loaded again; None where an engine would not export it.

        Args:
            bundle: Folder of its bundle.
            pinned: Folder of its copies, see `LoadModel.pinned`.
            report: Called with each step of the export.

        Raises:
            PenstockError: The bundle is not there any more.
        """
        bundle = pinned_bundle(pinned, str(bundle))
        if self._exports is None or not await self._exports.is_needed(bundle):
            return None
        return self._export(self._exports, bundle, await asyncio.to_thread(reference_of, pinned), report)

    def reason_unexported(self, bundle: Path) -> str:
        """Return why an engine is not to export the network of a bundle; empty if it may."""
        # Not taken away: two clients may load the same model at once.
        return "" if self._exports is None else self._unexported.get(bundle, NO_GRAPH)

    async def _export(self, exports: Exports, bundle: Path, app: str, report: Report) -> None:
        reason = await exports.export(bundle, app, report)
        if reason:
            self._unexported[bundle] = reason[:MAX_REASON]
        else:
            self._unexported.pop(bundle, None)
