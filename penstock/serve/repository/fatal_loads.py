"""Models whose loads end processes, so that one such model does not keep the others from being served.

A load is fatal when the engine or the front-end that makes it ends meanwhile. The trial of a bundle finds most of
these applications; one that ends only its second import, or needs more memory than there is, passes the trial.
"""

import time
from collections.abc import Callable
from typing import final

# A model is left out after so many fatal loads in a row of one process. A process that was killed says less: anybody
# may have killed it.
MAX_ENDS, MAX_KILLS = 2, 4
# A model is left out for so long, and twice as long each time until the last.
MIN_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0


@final
class FatalLoads:
    """Counts fatal loads and says which models are left out, and for how long.

    Args:
        now_s: A monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        # Ends and kills, by the number of the model and the name of the process.
        self._counts: dict[tuple[int, str], tuple[int, int]] = {}
        # By the number of the model: when it is loaded again, and the pause before that.
        self._pauses: dict[int, tuple[float, float]] = {}

    def record_end(self, model: int, process: str, *, killed: bool) -> float:
        """Record that a process ended while it loaded a model.

        Args:
            model: Number of the model, see `LoadModel.model`.
            process: Name of the process.
            killed: Whether SIGKILL ended it.

        Returns:
            The pause that begins now, in seconds; 0 if the model is loaded again at once.
        """
        ends, kills = self._counts.get((model, process), (0, 0))
        ends, kills = ends + (not killed), kills + killed
        self._counts[model, process] = ends, kills
        if ends < MAX_ENDS and kills < MAX_KILLS:
            return 0.0
        return self.leave_out(model)

    def leave_out(self, model: int) -> float:
        """Begin a pause; returns it in seconds."""
        for counted in [each for each in self._counts if each[0] == model]:
            del self._counts[counted]
        _, before_s = self._pauses.get(model, (0.0, 0.0))
        pause_s = min(max(2 * before_s, MIN_PAUSE_S), MAX_PAUSE_S)
        self._pauses[model] = self._now_s() + pause_s, pause_s
        return pause_s

    def record_loaded(self, model: int, process: str) -> None:
        """Record that a process loaded a model and lives."""
        self._counts.pop((model, process), None)

    def left_s(self, model: int) -> float:
        """Return the time for which a model is still left out, in seconds."""
        until_s, _ = self._pauses.get(model, (0.0, 0.0))
        return max(0.0, until_s - self._now_s())

    def was_left_out(self, model: int) -> bool:
        """Tell whether a model is left out, or was."""
        return model in self._pauses

    def forget(self, model: int) -> None:
        """Forget a model that is not served any more."""
        self._pauses.pop(model, None)
        for counted in [each for each in self._counts if each[0] == model]:
            del self._counts[counted]
