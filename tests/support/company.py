"""A small streaming network, and one stream of it among others that open and close."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.core.spec import TensorSpec
from penstock.nn import GRU, CausalConv1d, Lookahead, Sequential, StreamingAttention
from penstock.runtime.executor import Executor, StepInput
from penstock.runtime.streaming_executor import RunStep, StatefulNetwork, StreamingExecutor

FRAMES, FEATURES, SLOTS = 4, 3, 5
CHUNK = TensorSpec(dtype="float32", shape=(FRAMES, FEATURES), meaning="frames")
# A conv with stride 2 makes at most 2 of 4 frames, and the look ahead gives 2 more at the end.
SCORES = TensorSpec(dtype="float32", shape=(4, 2), meaning="scores")


def network() -> Sequential:
    torch.manual_seed(3)
    return Sequential(
        CausalConv1d(FEATURES, 4, 3, 2), GRU(4, 4), StreamingAttention(4, 2, 3), Lookahead(4, 2), nn.Linear(4, 2)
    )


def executor(
    kind: Any = StreamingExecutor, *, max_rows: int = SLOTS, exact: bool = False, run: RunStep | None = None
) -> Any:
    device = "cpu" if kind is StreamingExecutor else "cuda"
    given = StatefulNetwork(network(), CHUNK, SCORES, slots=SLOTS, device=device, run=run)
    return kind(given, max_rows=max_rows, exact=exact)


def offline(frames: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network().eval()(torch.from_numpy(frames)[None])[0].numpy()


def batch(rows: list[tuple[int, np.ndarray, bool, bool]]) -> StepInput:
    """Make a batch of rows of slot, frames, first and last."""
    chunk_B = np.full((len(rows), FRAMES, FEATURES), np.nan, np.float32)
    for index, (_, frames, _, _) in enumerate(rows):
        chunk_B[index, : len(frames)] = frames
    return StepInput(
        slots_B=np.array([row[0] for row in rows]),
        chunk_B=chunk_B,
        length_B=np.array([len(row[1]) for row in rows]),
        fresh_B=np.array([row[2] for row in rows]),
        last_B=np.array([row[3] for row in rows]),
    )


def heard(made: Executor, seed: int, company: bool) -> np.ndarray:
    """Run one stream of 12 chunks, alone or beside others in random slots and rows; return its outputs."""
    rng, others = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    chunks = [rng.normal(size=(int(rng.integers(1, FRAMES + 1)), FEATURES)).astype(np.float32) for _ in range(12)]
    slot = int(others.integers(SLOTS)) if company else 0
    outputs: list[np.ndarray] = []
    for number, chunk in enumerate(chunks):
        rows = [(slot, chunk, number == 0, number == len(chunks) - 1)]
        if company:
            near = [other for other in range(SLOTS) if other != slot and others.random() < 0.6]
            rows += [(other, others.normal(size=(FRAMES, FEATURES)), others.random() < 0.3, False) for other in near]
        order = others.permutation(len(rows))
        result = made.step(batch([rows[index] for index in order]))
        assert result.length_B is not None
        place = int(np.argmin(order))
        outputs.append(result.output_B[place, : result.length_B[place]].copy())
    return np.concatenate(outputs)


def several_saved(kind: Any = StreamingExecutor) -> None:
    """Streams of one executor go on in another one, in other slots, all states read and written at once."""
    signals = np.random.default_rng(1).normal(size=(3, 3 * FRAMES, FEATURES)).astype(np.float32)
    here, there = executor(kind), executor(kind)
    slots_here, slots_there = np.array([4, 0, 2]), np.array([1, 3, 4])
    assert here.state_layout == there.state_layout

    def step(made: Executor, slots: np.ndarray, begin: int, *, last: bool) -> list[np.ndarray]:
        rows = [
            (slot, frames[begin : begin + FRAMES], begin == 0, last)
            for slot, frames in zip(slots.tolist(), signals, strict=True)
        ]
        result = made.step(batch(rows))
        assert result.length_B is not None
        return [output[:count].copy() for output, count in zip(result.output_B, result.length_B, strict=True)]

    outputs = [step(here, slots_here, 0, last=False)]
    begun = here.begin_read(slots_here)
    # What was begun to be read is not what later steps leave.
    step(here, slots_here, FRAMES, last=False)
    states = here.finish_read(begun)
    assert here.read_done(begun)
    assert states.shape == (3, here.state_bytes)
    assert states.dtype == np.uint8
    there.write_states(slots_there, states)
    outputs += [step(there, slots_there, begin, last=begin == 2 * FRAMES) for begin in (FRAMES, 2 * FRAMES)]
    for frames, parts in zip(signals, zip(*outputs, strict=True), strict=True):
        np.testing.assert_allclose(np.concatenate(parts), offline(frames), atol=1e-4)


def exact_in_any_company(kind: Any, seeds: Iterable[int]) -> bool:
    """Compare the bits of a stream alone with those of a stream among others."""
    return all(
        heard(executor(kind, exact=True, max_rows=32), seed, company=False).tobytes()
        == heard(executor(kind, exact=True, max_rows=32), seed, company=True).tobytes()
        for seed in seeds
    )


def by_onnx(graph: Path) -> Any:
    """Make the executor of the exported step."""
    from penstock.runtime.onnx.onnx_step import ExportedStep

    return executor(run=ExportedStep(graph, network().initial_state(1), threads=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        # In a process of its own, as a server does it: the exporter has its own warnings.
        from penstock.runtime.onnx.onnx_export import export_step

        export_step(network().eval(), CHUNK, Path(sys.argv[1]))
    else:
        print(exact_in_any_company(StreamingExecutor, range(20)))
