"""Answers that take steps, put together from the results of a slot."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from penstock.core.application import Application
from penstock.core.generate import END, MAX_STEPS, STEPS
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.table import slots

# Called once: a status; the whole answer, empty without one; why it ended.
Whole = Callable[[int, Array, str], None]

GOOD = (slots.OK, slots.CUT)


# Why the answer of each row of a request ended, in their order; empty where answers take one step.
Ends = list[str]


def ends_text(ends: Sequence[str]) -> str:
    """Return the reasons of several rows as one text, for places that hold no list."""
    return ",".join(ends)


def ended_by(status: int) -> str:
    """Return the reason why an answer ended, by the status of its last result."""
    return MAX_STEPS if status == slots.CUT else END


@final
class WholeAnswer:
    """Collects the results of one request until the last, and hands on the whole answer.

    Args:
        application: An application that generates.
        finished: Called once, with the status of the last result, the whole answer, one chunk of `application.answer`,
            empty if there is none; and the reason why it ended.
    """

    def __init__(self, application: Application, finished: Whole) -> None:
        self._application, self._finished = application, finished
        self._outputs: list[Array] = []

    def __call__(self, status: int, output: Array, last: bool) -> None:
        """Take a result, see `table_writer.SlotHandle`."""
        if status in GOOD:
            # The table's memory is used again.
            self._outputs.append(output.copy())
        if last:
            good = status in GOOD
            answer = whole_of(self._application, self._outputs) if good else np.empty(0)
            self._finished(status, answer, ended_by(status))


def whole_of(application: Application, outputs: list[Array]) -> Array:
    """Stack the outputs of all steps of one answer, each flat; returns one chunk of `application.answer`."""
    spec = application.answer
    assert isinstance(spec, RecordSpec), spec
    record = spec.empty(1)
    record[STEPS] = steps = len(outputs)
    output = application.output
    if isinstance(output, RecordSpec):
        stacked = np.concatenate(outputs)
        for tensor in output.tensors:
            record[tensor.name][0, :steps] = stacked[tensor.name]
    else:
        record[output.name][0, :steps] = np.stack(outputs).reshape(steps, *output.shape)
    return record[0, ...]
