"""Recorded examples of a pack."""

from dataclasses import dataclass

from penstock.core.agreement import RecordedAnswers
from penstock.core.spec import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PackGolden(RecordedAnswers):
    """Recorded inputs and outputs of a pack; for the answers see `RecordedAnswers`.

    Args:
        inputs: The inputs without a batch dimension, one array or record each; for a live pack, whole signals.
    """

    inputs: tuple[Array, ...]
