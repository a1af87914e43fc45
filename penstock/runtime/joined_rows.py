"""Check that an answer that takes steps is the same where requests join those in progress."""

import numpy as np
from torch import nn

from penstock.core.application import Application
from penstock.core.bundles.golden import Golden
from penstock.core.errors import ApplicationError, GoldenMismatch, one_line
from penstock.core.spec import Array
from penstock.runtime.generation.generating import Generating, Rows
from penstock.runtime.generation.generation_executor import GenerationExecutor

# B rows of a batch

# Golden examples that are begun one after another.
ROWS_JOINED = 4


def check_joined(application: Application, module: nn.Module, golden: Golden) -> None:
    """Check that examples have the recorded answers where each begins a step after the one before.

    A network that keeps an answer's state in itself, and not in what `begin` and `step` return, gives right answers as
    long as all rows begin together.

    Raises:
        ApplicationError: An answer differs, or the network fails.
    """
    if application.generate is None or len(golden.inputs) < 2:
        return
    executor = GenerationExecutor(module, application)

    def some_joined(inputs: Array) -> Array:
        answers = golden.outputs.copy()
        answers[:ROWS_JOINED] = joined_answers(executor, inputs[:ROWS_JOINED])
        return answers

    try:
        golden.check(some_joined)
    except Exception as error:
        # The application's network may raise anything.
        cause = str(error).partition(";")[0] if isinstance(error, GoldenMismatch) else one_line(error)
        raise ApplicationError(
            f"the network of {application.name!r} answers otherwise, or fails, where an example begins while others "
            f"are in progress, as on a server: {cause}; keep all that an answer needs in the state that begin and step "
            f"return, and nothing of it in the network."
        ) from error


def joined_answers(executor: Generating, chunk_B: Array) -> Array:
    """Compute whole answers, records `[B]`. Each row begins one step after the row before it."""
    answers, limits_B = executor.no_answers(len(chunk_B)), executor.limits(chunk_B)
    rows_B: Rows = np.arange(0)
    state, begun = None, 0
    while rows_B.size or begun < len(chunk_B):
        if begun < len(chunk_B):
            new = executor.begin(chunk_B[begun : begun + 1])
            state = executor.join([new] if state is None else [state, new])
            rows_B, begun = np.append(rows_B, begun), begun + 1
        state, output_B, done_B, full_B = executor.step(state)
        executor.append(answers, rows_B, output_B)
        over_B = done_B | full_B | (answers["steps"][rows_B] >= limits_B[rows_B])
        if over_B.all():
            state, rows_B = None, rows_B[:0]
        elif over_B.any():
            state, order = executor.keep(state, ~over_B)
            rows_B = rows_B[order]
    return answers
