"""Check that a pack's graph agrees with its bundle."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.agreement import Agreement, scales_of
from penstock.core.dim import Dim
from penstock.core.errors import GoldenMismatch, PackError, one_line
from penstock.core.finish import network_output
from penstock.core.machine.onnx_session import onnx_errors
from penstock.core.packs.pack_tensors import rows_of
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.state_layout import PAGE
from penstock.export.graph_report import GraphReport
from penstock.nn.streaming import Streaming
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.runtime.load import Predictor, streaming_executor
from penstock.runtime.named_network import FinishedNetwork
from penstock.runtime.onnx.onnx_step import ExportedStep
from penstock.runtime.onnx.prepare_session import random_raws
from penstock.runtime.onnx.streaming_onnx import check_equivalent
from penstock.runtime.torch_executor import TorchExecutor
from penstock.runtime.whole_signals import run_in_chunks

# N examples

BLENDS = 8
OTHER_SIZES = 6
SHORT_LENGTHS = (0, 1, 2, 3, 5)
ALIKE_SLOTS = 3
# More than the room of the first page.
FIRST_STEPS = PAGE + 8


def check_oneshot(predictor: Predictor, report: GraphReport, file: Path, finished: Array | None = None) -> float:
    """Compare a one-shot graph with its bundle on the golden examples and on others; return the largest difference.

    The others are blends of the golden ones; for inputs of varying length, golden ones cut or repeated to the shortest,
    the longest and other lengths; for raw arrays of any size, random arrays of several sizes.

    Args:
        predictor: The bundle's network.
        report: Inputs and outputs of the graph.
        file: The graph.
        finished: Result of `check_network_outputs`, where there is a finish: also right, except for golden examples.

    Raises:
        PackError: The difference exceeds the bundle's tolerance.
    """
    network, golden = report.network(file), predictor.files.golden
    recorded, others = list(golden.raws or rows_of(golden.inputs)), _others(predictor)
    answers = [network.answer(given) for given in (*recorded, *others)]
    expected = np.concatenate([golden.outputs, *_expected(predictor, others)])
    output = predictor.application.output
    tolerance = golden.tolerance
    if report.sets is not None:
        # The examples may have no rows, so that only their share of the largest number is a tolerance for others.
        tolerance *= max(scales_of(expected).values()) / max(scales_of(golden.outputs).values())
    rule = Agreement(output=output, sets=report.sets, tolerance=tolerance, scales=scales_of(expected))
    found = np.stack([answer for answer, *_ in answers])
    if finished is not None and found.shape == expected.shape:
        for row in range(len(recorded), len(expected)):
            if not rule.worst(found[row, None], expected[row, None]).difference <= tolerance:
                expected[row] = finished[row]
    differences = [_agree(found, expected, rule)]
    if len(report.outputs) > report.answers:
        embeddings = np.stack([_embedding(predictor, given) for given in (*recorded, *others)])
        rule = _plain(embeddings, golden.tolerance * max(scales_of(embeddings).values()))
        differences.append(_agree(np.stack([embedding for _, embedding in answers]), embeddings, rule))
    return max(differences)


def check_generation(predictor: Predictor, report: GraphReport, file: Path) -> float:
    """Compare answers that take steps with those of the bundle; return the largest difference.

    Answers to the golden examples are compared whole. Of others, as in `check_oneshot`, the first steps are: they may
    run to the maximum of steps, and all further ones have the same graph and another room.

    Args:
        predictor: The bundle's network.
        report: Inputs and outputs of the graphs.
        file: The graph of `begin`, with that of `step` beside it.

    Raises:
        PackError: The difference exceeds the bundle's tolerance, or whole numbers differ.
    """
    golden, others = predictor.files.golden, _others(predictor)
    recorded = golden.raws or rows_of(golden.inputs)
    differences = [_agree(report.network(file).answers(recorded), golden.outputs, golden.agreement)]
    assert report.generate is not None, report
    begun = replace(report.generate, max_steps=min(FIRST_STEPS, report.generate.max_steps))
    application = replace(predictor.application, generate=begun)
    executor = GenerationExecutor(predictor.module, application)
    if others:
        answers = replace(report, generate=begun).network(file).answers(others)
        expected = np.concatenate([*_expected(replace(predictor, executor=executor), others)])
        rule = replace(golden.agreement, output=application.answer, scales=scales_of(expected))
        differences.append(_agree(answers, expected, rule))
    return max(differences)


def check_network_outputs(predictor: Predictor, report: GraphReport, file: Path) -> Array:
    """Compare what the network gives to its `finish` in a graph that also gives that.

    A finish compares numbers, such as a place with the one beside it. Where both are equal but for rounding, the graph
    may choose another one than the bundle. It is right if torch chooses the same from the graph's own numbers.

    Args:
        predictor: The bundle's network.
        report: Inputs and outputs of the graph, all of them as its answer.
        file: The graph.

    Returns:
        Outputs of torch's finish for the graph's numbers, of the golden examples and the others.

    Raises:
        PackError: The difference exceeds the bundle's tolerance.
    """
    application, golden = predictor.application, predictor.files.golden
    assert application.finish is not None, application.name
    network, names = report.network(file), [spec.name for spec in application.finish.tensors]
    trusted = TorchExecutor(predictor.module, application.input, report.tensors.output)
    given = [*(golden.raws or rows_of(golden.inputs)), *_others(predictor)]
    chunks = given if predictor.preparing is None else list(map(predictor.preparing, given))
    every = np.stack([network.answer(each)[0] for each in given])
    answers = every[names]
    expected = np.concatenate([trusted.predict(chunk[None].copy()) for chunk in chunks])[names]
    share = golden.tolerance / max(scales_of(golden.outputs).values())
    _agree(answers, expected, _plain(expected, share * max(scales_of(expected).values())))
    return _finished(predictor, every)


def _finished(predictor: Predictor, answers: Array) -> Array:
    """Run the finish in torch on what a graph gives to it."""
    application, module = predictor.application, predictor.module
    assert application.finish is not None, application.name
    assert isinstance(module, FinishedNetwork), type(module)
    between = network_output(application.finish)
    executor = TorchExecutor(module.finish.module, between, application.output)
    given = (
        np.ascontiguousarray(answers[between.name]) if isinstance(between, TensorSpec) else between.empty(len(answers))
    )
    for name in given.dtype.names or ():
        given[name] = answers[name]
    return np.concatenate([executor.predict(given[row, None].copy()) for row in range(len(given))])


def _expected(predictor: Predictor, others: list[Array]) -> Iterator[Array]:
    """The bundle's answers `[1, ...]`, one input at a time."""
    for chunk in others if predictor.preparing is None else map(predictor.preparing, others):
        yield predictor.executor.predict(chunk[None].copy())


def _embedding(predictor: Predictor, given: Array) -> Array:
    chunk = given if predictor.preparing is None else predictor.preparing(given)
    embed: Any = predictor.module.embed
    with torch.inference_mode():
        return embed(torch.from_numpy(chunk[None].copy())).numpy()[0]


def _others(predictor: Predictor) -> list[Array]:
    if predictor.preparing is not None:
        return random_raws(predictor.preparing.raw, OTHER_SIZES)
    spec, inputs = predictor.application.input, predictor.files.golden.inputs
    if isinstance(spec, RecordSpec):
        return [resized(spec, inputs[at % len(inputs)], lengths) for at, lengths in enumerate(_other_lengths(spec))]
    return list(_blends(inputs))


def _other_lengths(spec: RecordSpec) -> Iterator[dict[str, int]]:
    """Lengths of further inputs: the shortest, the longest and some between, in other combinations for each."""
    between = {
        name: sorted({min(max(length, dim.min), int(dim)) for length in (*SHORT_LENGTHS, int(dim) // 2, int(dim))})
        for name, dim in spec.dims.items()
    }
    for at in range(max(map(len, between.values()), default=0)):
        yield {name: found[(at + turn) % len(found)] for turn, (name, found) in enumerate(between.items())}


def resized(spec: RecordSpec, record: Array, lengths: Mapping[str, int]) -> Array:
    """Cut or repeat an input to other lengths.

    Returns:
        A record of no dimensions.
    """
    arrays = spec.unpack(np.asarray(record))
    for name, tensor in spec.by_name.items():
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Dim):
                array, wanted = arrays[name], np.arange(lengths[size.name])
                if not array.shape[axis]:
                    # There is nothing to repeat.
                    array = np.zeros((*array.shape[:axis], 1, *array.shape[axis + 1 :]), array.dtype)
                arrays[name] = array.take(wanted % array.shape[axis], axis)
    return spec.check(arrays)


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
        rule = _plain(golden.outputs, golden.tolerance)
        differences = [_agree(run_in_chunks(made, golden.inputs), golden.outputs, rule)]
        # A few signals in other chunks, which must not change the outputs.
        differences += [
            _agree(run_in_chunks(made, golden.inputs[:2], frames), golden.outputs[:2], rule)
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


def _plain(expected: Array, tolerance: float) -> Agreement:
    return Agreement(output=None, sets=None, tolerance=tolerance, scales=scales_of(expected))


def _agree(answers: Array, expected: Array, rule: Agreement) -> float:
    if answers.shape != expected.shape:
        raise _disagrees(f"it gives {list(answers.shape)} where the bundle gives {list(expected.shape)}")
    worst = rule.worst(answers, expected)
    # Written so that NaN fails.
    if not worst.difference <= rule.tolerance:
        reason = f"it differs {worst.beyond(rule.tolerance)}, most {worst.place()}{worst.numbers()}"
        raise _disagrees(reason, "" if rule.sets is None else rule.sets.fix)
    return worst.difference


def _disagrees(reason: str, fix: str = "") -> PackError:
    branches = "look for branches on tensor values and for randomness in the network."
    advice = f"{fix} If no rows swapped, {branches}" if fix else branches
    return PackError(
        f"the exported graph disagrees with the bundle, so no pack is written: {reason.rstrip('.')}. "
        f"{advice[0].upper()}{advice[1:]}"
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
