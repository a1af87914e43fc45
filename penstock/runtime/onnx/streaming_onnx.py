"""Streams stepped by ONNX Runtime, checked against torch before they are served.

The check runs the golden examples in chunks, and random streams that begin, pause and end. Outputs and states of both
must agree within the bundle's tolerance.
"""

import logging
from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch

from penstock.core.bundles.golden import Golden
from penstock.core.errors import GoldenMismatch
from penstock.core.spec import Array
from penstock.runtime.executor import StepInput
from penstock.runtime.load import Predictor, as_streaming, streaming_executor
from penstock.runtime.onnx.onnx_executor import steady_graph
from penstock.runtime.onnx.onnx_step import ExportedStep
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.runtime.whole_signals import run_in_chunks

# B rows of the batch, T frames of a chunk, U frames that come of them

log = logging.getLogger(__name__)

STEADY_STEPS = 16
COMPARED_STEPS = 24
COMPARED_SLOTS = 12


def onnx_streaming_executor(
    predictor: Predictor, served: StreamingExecutor, graph: Path, threads: int
) -> StreamingExecutor:
    """Make an executor that steps streams by a graph, and check it against torch.

    Args:
        predictor: The predictor of a live application.
        served: An idle executor that steps by torch; the result shares its states.
        graph: The exported step of the network.
        threads: CPU threads for one step.

    Raises:
        BundleError: It is not the graph of this network.
        Exception: One of `onnx_errors()`: ONNX Runtime does not run it.
    """
    application, golden = predictor.application, predictor.files.golden
    step = ExportedStep(graph, as_streaming(application, predictor.module).initial_state(1), threads=threads)
    # With small state tables of their own.
    made, trusted = (
        streaming_executor(application, predictor.module, slots=COMPARED_SLOTS, max_rows=COMPARED_SLOTS, run=run)
        for run in (step, None)
    )
    golden.check(lambda inputs: run_in_chunks(made, inputs))
    check_equivalent(made, trusted, golden, COMPARED_SLOTS)
    kept = "have a graph of their own" if steady_graph(graph).is_file() else "share the graph of all others"
    log.info("%s by ONNX Runtime with %d threads: whole chunks %s", application.name, threads, kept)
    return StreamingExecutor(served.network.run_by(step), max_rows=served.max_rows)


def check_equivalent(made: StreamingExecutor, trusted: StreamingExecutor, golden: Golden, slots: int) -> None:
    """Step random streams by two executors and compare them.

    Args:
        made: The executor to check; idle, and the states in its first slots are overwritten.
        trusted: The reference; likewise.
        golden: Whole signals, from which chunks are cut, and the tolerance.
        slots: The number of streams.

    Raises:
        GoldenMismatch: Their outputs or states differ.
    """
    for batch in _random_batches(golden.inputs, trusted, slots):
        before = [made.states.save(slot) for slot in batch.slots_B]
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
            now = made.states.save(slot)
            if paused and not all(map(torch.equal, now, was)):
                raise GoldenMismatch("the exported step changes the state of a stream that has no new frame.")
            for leaf, other in zip(now, trusted.states.save(slot), strict=True):
                # Buffered samples have the range of samples.
                largest = max(1.0, float(other.abs().max())) if other.numel() and other.is_floating_point() else 0.0
                _check_near("states", leaf.numpy(), other.numpy(), golden.tolerance * largest)


def _check_near(what: str, ours: Array, theirs: Array, tolerance: float) -> None:
    difference = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0))
    # Written so that NaN fails.
    if not difference <= tolerance:
        raise GoldenMismatch(
            f"the {what} of the exported step differ from the network's own by {difference:.3g} where {tolerance:.3g} "
            f"is allowed."
        )


def _random_batches(signals: Array, executor: StreamingExecutor, slots: int) -> Generator[StepInput]:
    """Generate batches in random order, of streams that begin, pause, send partial chunks, and end."""
    rng = np.random.default_rng(0)
    frames = executor.input.shape[0]
    most = min(slots, executor.max_rows)
    lives_S = np.zeros(slots, np.bool_)
    for number in range(STEADY_STEPS + COMPARED_STEPS):
        # Whole chunks first, until the buffer of each layer has reached its constant length.
        steady = number < STEADY_STEPS
        slots_B = rng.permutation(most if steady else slots)[: most if steady else int(rng.integers(1, most + 1))]
        rows = len(slots_B)
        fresh_B = ~lives_S[slots_B] | (rng.random(rows) < (0 if steady else 0.1))
        last_B = rng.random(rows) < (0 if steady else 0.1)
        lives_S[slots_B] = ~last_B
        length_B = rng.choice([frames] if steady else [0, frames, int(rng.integers(frames + 1))], rows)
        # Frames are drawn uniformly; those behind the valid ones are sound as well.
        frame_N = signals.reshape(-1, *signals.shape[2:])
        begin_B = rng.integers(len(frame_N), size=rows)
        chunk_B = frame_N[(begin_B[:, None] + np.arange(frames)) % len(frame_N)]
        yield StepInput(slots_B=slots_B, chunk_B=chunk_B, length_B=length_B, fresh_B=fresh_B, last_B=last_B)
