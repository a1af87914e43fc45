"""The exported step of a live application's network: shown to do what torch's does before it serves.

Beside the golden examples in chunks, streams that come, pause and end at random are stepped by both. Their outputs must
agree within the bundle's tolerance, and so must what is remembered of them.
"""

import logging
from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch

from penstock.core.errors import GoldenMismatch, PenstockError
from penstock.core.golden import Golden
from penstock.core.spec import Array
from penstock.runtime.executor import Batch
from penstock.runtime.exported_step import ExportedStep
from penstock.runtime.load import Predictor, streaming_of
from penstock.runtime.onnx_executor import steady_graph
from penstock.runtime.streamed import streamed
from penstock.runtime.streaming_executor import StreamingExecutor

# B rows of the batch, T frames of a chunk, U frames that come of them

log = logging.getLogger(__name__)

STEADY_STEPS = 16
COMPARED_STEPS = 24
COMPARED_SLOTS = 12


def stepped_by_onnx(
    predictor: Predictor, graph: Path, served: StreamingExecutor, *, threads: int
) -> StreamingExecutor | str:
    """What steps streams by a graph, shown to do what torch does; or why not.

    Args:
        predictor: Of a live application.
        graph: Its exported step.
        served: Steps the network by torch; idle. What is returned steps the same states.
        threads: CPU threads for one step.
    """
    application = predictor.application
    try:
        network = streaming_of(application, predictor.module)
        step = ExportedStep(graph, network.initial_state(1), threads=threads)
        # With tables of their own, which are small.
        made, trusted = (
            StreamingExecutor(
                network, application.input, application.output, slots=COMPARED_SLOTS, max_rows=COMPARED_SLOTS, run=run
            )
            for run in (step, None)
        )
        predictor.files.golden.check(lambda inputs: streamed(made, inputs))
        check_alike(made, trusted, predictor.files.golden, COMPARED_SLOTS)
    except PenstockError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        return f"{type(error).__name__}: {error}"
    kept = "have a graph of their own" if steady_graph(graph).is_file() else "are run like all others"
    log.info("%s by ONNX Runtime on %d threads: whole chunks %s", application.name, threads, kept)
    return served.run_by(step)


def check_alike(made: StreamingExecutor, trusted: StreamingExecutor, golden: Golden, slots: int) -> None:
    """Step random streams by both.

    Args:
        made: Idle, as `trusted` is; whatever lives in the first slots is gone.
        trusted: What is right.
        golden: Whole signals, pieces of which are sent, and the tolerance.
        slots: How many there are.

    Raises:
        GoldenMismatch: They give other outputs, or remember something else.
    """
    for batch in _random_batches(golden.inputs, trusted, slots):
        before = [made.saved(slot) for slot in batch.slots_B]
        ours, theirs = made.step(batch), trusted.step(batch)
        assert ours.length_B is not None
        assert theirs.length_B is not None
        if not np.array_equal(ours.length_B, theirs.length_B):
            raise GoldenMismatch("the exported step gives another number of frames than the network's own.")
        valid_BU = np.arange(ours.output_B.shape[1]) < ours.length_B[:, None]
        _check_near("outputs", ours.output_B[valid_BU], theirs.output_B[valid_BU], golden.tolerance)
        assert batch.last_B is not None
        paused_B = (batch.length_B == 0) & ~batch.last_B & ~batch.fresh_B
        for slot, paused, was in zip(batch.slots_B, paused_B, before, strict=True):
            now = made.saved(slot)
            if paused and not all(map(torch.equal, now, was)):
                raise GoldenMismatch("the exported step changes the state of a stream that has no new frame.")
            for leaf, other in zip(now, trusted.saved(slot), strict=True):
                # Samples that wait are as large as samples are.
                largest = max(1.0, float(other.abs().max())) if other.numel() and other.is_floating_point() else 0.0
                _check_near("states", leaf.numpy(), other.numpy(), golden.tolerance * largest)


def _check_near(what: str, ours: Array, theirs: Array, tolerance: float) -> None:
    difference = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0))
    # Written so that NaN is no agreement.
    if not difference <= tolerance:
        raise GoldenMismatch(
            f"the {what} of the exported step differ from the network's own by {difference:.3g} where {tolerance:.3g} "
            f"is allowed."
        )


def _random_batches(signals: Array, executor: StreamingExecutor, slots: int) -> Generator[Batch]:
    """Rows in any order, of streams that begin, pause, send less than a chunk, and end."""
    rng = np.random.default_rng(0)
    frames = executor.input.shape[0]
    most = min(slots, executor.max_rows)
    lives_S = np.zeros(slots, np.bool_)
    for number in range(STEADY_STEPS + COMPARED_STEPS):
        # At first whole chunks alone, until each layer waits for equally much.
        steady = number < STEADY_STEPS
        slots_B = rng.permutation(most if steady else slots)[: most if steady else int(rng.integers(1, most + 1))]
        rows = len(slots_B)
        fresh_B = ~lives_S[slots_B] | (rng.random(rows) < (0 if steady else 0.1))
        last_B = rng.random(rows) < (0 if steady else 0.1)
        lives_S[slots_B] = ~last_B
        length_B = rng.choice([frames] if steady else [0, frames, int(rng.integers(frames + 1))], rows)
        # Every frame of every example is as likely; what stands behind the valid ones is sound as well.
        frame_N = signals.reshape(-1, *signals.shape[2:])
        begin_B = rng.integers(len(frame_N), size=rows)
        chunk_B = frame_N[(begin_B[:, None] + np.arange(frames)) % len(frame_N)]
        yield Batch(slots_B=slots_B, chunk_B=chunk_B, length_B=length_B, fresh_B=fresh_B, last_B=last_B)
