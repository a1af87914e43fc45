"""A pack's graph shown to answer as its bundle does, before it is written and wherever it is run."""

from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import GoldenMismatch, PackError
from penstock.core.pack import PackLive
from penstock.core.spec import Array
from penstock.export.described import Described
from penstock.export.packed import packed_session
from penstock.nn.streaming import State, Step, Streaming, leaves, map_state
from penstock.runtime.load import Predictor
from penstock.runtime.prepared import random_raws
from penstock.runtime.streamed import streamed
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.runtime.streaming_graph import check_alike

# N examples, B batch (of one), T frames of a chunk

BLENDS = 8
OTHER_SIZES = 6
ALIKE_SLOTS = 3


@final
class PackedStep:
    """Does what a network's `step` does, for one row at a time, by a pack's graph.

    Args:
        session: ONNX Runtime's, of the graph.
        live: How streams go through it.
        input: The name of the graph's chunk.
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


def check_oneshot(predictor: Predictor, described: Described, file: Path) -> float:
    """The largest difference between a one-shot graph and its bundle: on the golden examples, and on others.

    The others are blends of the golden ones; of raw arrays of any size, arrays of several sizes.

    Args:
        predictor: Of the bundle.
        described: What goes into the graph and comes of it.
        file: The graph.

    Raises:
        PackError: It is above the bundle's tolerance.
    """
    network, golden = described.network(file), predictor.files.golden
    recorded, others = list(golden.raws or golden.inputs), _others(predictor)
    answers = [network.answer(given) for given in (*recorded, *others)]
    expected = np.stack([predictor.predict(given) for given in others])
    outputs = np.concatenate([golden.outputs, expected])
    differences = [_agree(np.stack([answer for answer, *_ in answers]), outputs, golden.tolerance)]
    if len(described.outputs) > 1:
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
    """The largest difference between the graph of a step and its bundle, over the golden signals in several chunks.

    Streams that come, pause and end at random are stepped by both as well.

    Raises:
        PackError: It is above the bundle's tolerance.
    """
    application, golden = predictor.application, predictor.files.golden
    step = PackedStep(packed_session(file), live, application.input.name)
    made, trusted = (
        StreamingExecutor(network, application.input, application.output, slots=ALIKE_SLOTS, max_rows=1, run=run)
        for run in (step, None)
    )
    try:
        differences = [_agree(streamed(made, golden.inputs), golden.outputs, golden.tolerance)]
        # A few signals in other chunks: what is cut otherwise must come out the same.
        differences += [
            _agree(streamed(made, golden.inputs[:2], frames), golden.outputs[:2], golden.tolerance)
            for frames in {max(1, live.chunk // 2), max(1, live.chunk * 2 // 3), max(1, live.chunk - 1)}
        ]
        check_alike(made, trusted, golden, ALIKE_SLOTS)
    except GoldenMismatch as error:
        raise _disagrees(str(error)) from None
    except PackError:
        raise
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        cause = " ".join(str(error).split())[:300]
        raise PackError(f"the exported graph fails on an example ({cause}); write the network otherwise.") from None
    return max(differences)


def _agree(answers: Array, expected: Array, tolerance: float) -> float:
    if answers.shape != expected.shape:
        raise _disagrees(f"it gives {list(answers.shape)} where the bundle gives {list(expected.shape)}")
    difference = float(np.abs(answers.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0))
    # Written so that NaN is no agreement.
    if not difference <= tolerance:
        raise _disagrees(f"it differs by {difference:.3g} where {tolerance:.3g} is allowed")
    return difference


def _disagrees(how: str) -> PackError:
    return PackError(
        f"the exported graph disagrees with the bundle, so no pack is written: {how.rstrip('.')}. Look for what the "
        f"network computes by its own numbers or by chance."
    )


def _blends(input_N: Array) -> Array:
    """More inputs that are like real ones: means of two, and some that are turned around."""
    rng = np.random.default_rng(0)
    one, other = (input_N[rng.integers(len(input_N), size=BLENDS)] for _ in range(2))
    if input_N.dtype.kind == "b":
        return one ^ other
    mean = one // 2 + other // 2 if input_N.dtype.kind in "iu" else (one + other) / 2
    turned = np.flip(one, axis=-1) if input_N.ndim > 1 else one
    return np.concatenate([mean, turned]).astype(input_N.dtype)
