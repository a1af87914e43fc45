"""Check that a pack's graph agrees with its bundle."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import GoldenMismatch, PackError, one_line
from penstock.core.onnx_session import onnx_errors
from penstock.core.spec import Array
from penstock.export.graph_report import GraphReport
from penstock.nn.streaming import Streaming
from penstock.runtime.load import Predictor, streaming_executor
from penstock.runtime.onnx_step import ExportedStep
from penstock.runtime.prepare_session import random_raws
from penstock.runtime.streaming_onnx import check_equivalent
from penstock.runtime.whole_signals import run_in_chunks

# N examples

BLENDS = 8
OTHER_SIZES = 6
ALIKE_SLOTS = 3


def check_oneshot(predictor: Predictor, report: GraphReport, file: Path) -> float:
    """Compare a one-shot graph with its bundle on the golden examples and on others; return the largest difference.

    The others are blends of the golden ones or, for raw arrays of any size, random arrays of several sizes.

    Args:
        predictor: The bundle's network.
        report: Inputs and outputs of the graph.
        file: The graph.

    Raises:
        PackError: The difference exceeds the bundle's tolerance.
    """
    network, golden = report.network(file), predictor.files.golden
    recorded, others = list(golden.raws or golden.inputs), _others(predictor)
    answers = [network.answer(given) for given in (*recorded, *others)]
    expected = np.stack([predictor.predict(given) for given in others])
    outputs = np.concatenate([golden.outputs, expected])
    differences = [_agree(np.stack([answer for answer, *_ in answers]), outputs, golden.tolerance)]
    if len(report.outputs) > 1:
        embeddings = np.stack([_embedding(predictor, given) for given in (*recorded, *others)])
        tolerance = golden.tolerance * max(1.0, float(np.abs(embeddings).max()))
        differences.append(_agree(np.stack([embedding for _, embedding in answers]), embeddings, tolerance))
    return max(differences)


def _embedding(predictor: Predictor, given: Array) -> Array:
    chunk = given if predictor.preparing is None else predictor.preparing(given)
    embed: Any = predictor.module.embed
    with torch.inference_mode():
        return embed(torch.from_numpy(chunk[None].copy())).numpy()[0]


def _others(predictor: Predictor) -> list[Array]:
    if predictor.preparing is None:
        return list(_blends(predictor.files.golden.inputs))
    return random_raws(predictor.preparing.raw, OTHER_SIZES)


def check_live(predictor: Predictor, network: Streaming, file: Path) -> float:
    """Compare a live graph with its bundle on the golden signals, in several chunkings; return the largest difference.

    Streams that begin, pause and end at random are stepped by both as well.

    Raises:
        PackError: The difference exceeds the bundle's tolerance.
    """
    application, golden = predictor.application, predictor.files.golden
    chunk = application.input_tensor.shape[0]
    try:
        step = ExportedStep(
            file, network.initial_state(1), threads=1, chunk=application.input_tensor.name, any_batch=False
        )
        made, trusted = (
            streaming_executor(application, predictor.module, slots=ALIKE_SLOTS, max_rows=1, run=run)
            for run in (step, None)
        )
        differences = [_agree(run_in_chunks(made, golden.inputs), golden.outputs, golden.tolerance)]
        # A few signals in other chunks, which must not change the outputs.
        differences += [
            _agree(run_in_chunks(made, golden.inputs[:2], frames), golden.outputs[:2], golden.tolerance)
            for frames in {max(1, chunk // 2), max(1, chunk * 2 // 3), max(1, chunk - 1)}
        ]
        check_equivalent(made, trusted, golden, ALIKE_SLOTS)
    except GoldenMismatch as error:
        raise _disagrees(str(error)) from None
    except onnx_errors() as error:
        raise PackError(
            f"the exported graph fails on an example ({one_line(error)}); write the network otherwise."
        ) from None
    return max(differences)


def _agree(answers: Array, expected: Array, tolerance: float) -> float:
    if answers.shape != expected.shape:
        raise _disagrees(f"it gives {list(answers.shape)} where the bundle gives {list(expected.shape)}")
    difference = float(np.abs(answers.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0))
    # Written so that NaN fails.
    if not difference <= tolerance:
        raise _disagrees(f"it differs by {difference:.3g} where {tolerance:.3g} is allowed")
    return difference


def _disagrees(reason: str) -> PackError:
    return PackError(
        f"the exported graph disagrees with the bundle, so no pack is written: {reason.rstrip('.')}. Look for "
        f"branches on tensor values and for randomness in the network."
    )


def _blends(input_N: Array) -> Array:
    """Further realistic inputs: means of two, and flipped ones."""
    rng = np.random.default_rng(0)
    one, other = (input_N[rng.integers(len(input_N), size=BLENDS)] for _ in range(2))
    if input_N.dtype.kind == "b":
        return one ^ other
    mean = one // 2 + other // 2 if input_N.dtype.kind in "iu" else (one + other) / 2
    turned = np.flip(one, axis=-1) if input_N.ndim > 1 else one
    return np.concatenate([mean, turned]).astype(input_N.dtype)
