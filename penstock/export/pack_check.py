"""Check that a pack's graph agrees with its bundle."""

from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import GoldenMismatch, PackError, one_line
from penstock.core.onnx_session import onnx_errors
from penstock.core.pack import PackLive
from penstock.core.spec import Array
from penstock.export.graph_report import GraphReport
from penstock.export.pack_session import packed_session
from penstock.nn.streaming import State, Step, Streaming, leaves, map_state
from penstock.runtime.load import Predictor
from penstock.runtime.prepare_session import random_raws
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.runtime.streaming_onnx import check_equivalent
from penstock.runtime.whole_signals import run_in_chunks

# N examples, B batch (of one), T frames of a chunk

BLENDS = 8
OTHER_SIZES = 6
ALIKE_SLOTS = 3


@final
class PackedStep:
    """A network's `step`, computed by a pack's graph for one row.

    Args:
        session: ONNX Runtime session of the graph.
        live: Its inputs and outputs.
        input: Name of the chunk's input.
    """

    def __init__(self, session: Any, live: PackLive, input: str) -> None:
        self._session = session
        self._live = live
        self._input = input

    def __call__(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor) -> Step:
        """See `Streaming.step`; B is 1."""
        named = zip(self._live.states, leaves(state), strict=True)
        feeds = {self._input: chunk_BT, self._live.length: length_B, self._live.last: last_B}
        feeds |= {leaf.input: value for leaf, value in named}
        given = {name: np.ascontiguousarray(value.numpy()) for name, value in feeds.items()}
        output_BU, frames_B, *after = map(torch.from_numpy, self._session.run(None, given))
        left = iter(after)
        return Step(output_BU, frames_B, map_state(lambda _: next(left), state))


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


def check_live(predictor: Predictor, network: Streaming, file: Path, live: PackLive) -> float:
    """Compare a live graph with its bundle on the golden signals, in several chunkings; return the largest difference.

    Streams that begin, pause and end at random are stepped by both as well.

    Raises:
        PackError: The difference exceeds the bundle's tolerance.
    """
    application, golden = predictor.application, predictor.files.golden
    step = PackedStep(packed_session(file), live, application.input.name)
    made, trusted = (
        StreamingExecutor(network, application.input, application.output, slots=ALIKE_SLOTS, max_rows=1, run=run)
        for run in (step, None)
    )
    try:
        differences = [_agree(run_in_chunks(made, golden.inputs), golden.outputs, golden.tolerance)]
        # A few signals in other chunks, which must not change the outputs.
        differences += [
            _agree(run_in_chunks(made, golden.inputs[:2], frames), golden.outputs[:2], golden.tolerance)
            for frames in {max(1, live.chunk // 2), max(1, live.chunk * 2 // 3), max(1, live.chunk - 1)}
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
