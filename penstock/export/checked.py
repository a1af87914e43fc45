"""A pack's graph shown to answer as its bundle does, before it is written and wherever it is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import GoldenMismatch, PackError
from penstock.core.golden import Golden
from penstock.core.pack import PackLive
from penstock.core.spec import Array
from penstock.export.packed import packed_session
from penstock.nn.streaming import State, Step, Streaming, leaves, map_state
from penstock.runtime.load import Predictor
from penstock.runtime.streamed import streamed
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.runtime.streaming_graph import check_alike

# N examples, B batch (of one), T frames of a chunk

BLENDS = 8
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


def check_oneshot(predictor: Predictor, file: Path, *, embeds: bool) -> float:
    """The largest difference between a one-shot graph and its bundle, on the golden examples and blends of them.

    Raises:
        PackError: It is above the bundle's tolerance.
    """
    session = packed_session(file)
    name = session.get_inputs()[0].name
    golden = predictor.files.golden

    def run(which: int) -> Callable[[Array], Array]:
        return lambda chunk_N: np.concatenate([session.run(None, {name: chunk[None]})[which] for chunk in chunk_N])

    seen = np.concatenate([golden.inputs, _blends(golden.inputs)])
    expected = Golden(inputs=seen, outputs=predictor.executor.predict(seen.copy()), tolerance=golden.tolerance)
    checks = [(golden, 0), (expected, 0)]
    if embeds:
        embed: Any = predictor.module.embed
        with torch.inference_mode():
            embedding_N = embed(torch.from_numpy(seen.copy())).numpy()
        tolerance = golden.tolerance * max(1.0, float(np.abs(embedding_N).max()))
        checks.append((Golden(inputs=seen, outputs=embedding_N, tolerance=tolerance), 1))
    return max(_agrees(recorded, run(which)) for recorded, which in checks)


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
    differences = [_agrees(golden, lambda signals: streamed(made, signals))]
    # A few signals in other chunks: what is cut otherwise must come out the same.
    some = Golden(inputs=golden.inputs[:2], outputs=golden.outputs[:2], tolerance=golden.tolerance)
    differences += [
        _agrees(some, lambda signals, frames=frames: streamed(made, signals, frames))
        for frames in {max(1, live.chunk // 2), max(1, live.chunk * 2 // 3), max(1, live.chunk - 1)}
    ]
    try:
        check_alike(made, trusted, golden, ALIKE_SLOTS)
    except GoldenMismatch as error:
        raise _disagrees(str(error)) from None
    return max(differences)


def _agrees(golden: Golden, predict: Callable[[Array], Array]) -> float:
    try:
        answers = predict(golden.inputs.copy())
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        cause = " ".join(str(error).split())[:300]
        raise PackError(f"the exported graph fails on an example ({cause}); write the network otherwise.") from None
    if answers.shape != golden.outputs.shape:
        raise _disagrees(f"it gives {list(answers.shape)} where the bundle gives {list(golden.outputs.shape)}")
    apart = np.abs(answers.astype(np.float64) - golden.outputs.astype(np.float64))
    difference = float(apart.max(initial=0.0))
    # Written so that NaN is no agreement.
    if not difference <= golden.tolerance:
        raise _disagrees(f"it differs by {difference:.3g} where {golden.tolerance:.3g} is allowed")
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
