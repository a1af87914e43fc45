"""Early stopping (Prechelt, 1998): end a training when a metric has not improved for some validations."""

from collections.abc import Mapping
from typing import Literal, final

from penstock.core.errors import TrainError
from penstock.core.wording.counted import counted
from penstock.train.callbacks.callback import Callback, Started, Stop, Validated


@final
class EarlyStopping(Callback):
    """Stop a training whose metric no longer improves. A resumed training counts the validations before too.

    Args:
        patience: Validations without improvement after which the training stops.
        metric: Name of a validation metric, or `"loss"`; by default the metric that selects the best weights.
        mode: `"max"` if a larger value is better, else `"min"`; needed if `metric` is given.
        min_delta: A change of no more than this is no improvement.

    Raises:
        TrainError: An argument is out of range.
    """

    def __init__(
        self,
        patience: int,
        *,
        metric: str | None = None,
        mode: Literal["max", "min"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise TrainError(f"EarlyStopping has patience {patience!r}; it must be a whole number above 0.")
        if not min_delta >= 0:
            raise TrainError(f"EarlyStopping has min_delta {min_delta!r}; it must be 0 or more.")
        if (metric is None) != (mode is None) or mode not in ("max", "min", None):
            raise TrainError(
                f"EarlyStopping has metric {metric!r} and mode {mode!r}; give both, as metric='accuracy', mode='max', "
                f"or none for the metric that selects the best weights."
            )
        self.metric = metric
        self._patience, self._mode, self._min_delta = patience, mode, min_delta
        self._name, self._is_max = "", False
        self._best: float | None = None
        self._since_best = 0

    def start(self, event: Started) -> Stop | None:
        """Count the validations of the run before it was stopped."""
        self._name = self.metric or event.metric
        self._is_max = (self._mode or event.mode) == "max"
        self._best, self._since_best = None, 0
        for figures in event.validations:
            self._count(figures)
        return self._decision()

    def validation(self, event: Validated) -> Stop | None:
        """Compare the metric with the best so far."""
        self._count(event.figures)
        return self._decision()

    def _count(self, figures: Mapping[str, float]) -> None:
        value = figures[f"validation_{self._name}"]
        gain = None if self._best is None else (value - self._best) * (1 if self._is_max else -1)
        # False for NaN.
        if (gain is None and value == value) or (gain is not None and gain > self._min_delta):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1

    def _decision(self) -> Stop | None:
        if self._since_best < self._patience:
            return None
        best = "" if self._best is None else f" over {self._best:.6g}"
        return Stop(reason=f"{self._name} has not improved{best} in {counted(self._since_best, 'validation')}")
