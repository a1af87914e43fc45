"""Quantize a pack's network to 8 bits; kept if it is smaller and loses at most one point of accuracy."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import final

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from penstock.core.packs.pack import FP32, INT8, MODEL_INT8, PackModel
from penstock.core.packs.pack_golden import PackGolden
from penstock.core.spec import Array
from penstock.export.graph_report import GraphReport
from penstock.export.pack_session import PackedNetwork, Validation, measure

# Everything else stays in float32.
OPERATIONS = ["Conv", "Gemm", "MatMul"]
MAX_LOSS = 0.01


@final
class _GoldenFeeds(CalibrationDataReader):
    """The network's inputs on the golden examples."""

    def __init__(self, feeds: Iterator[dict[str, Array]]) -> None:
        self._feeds = feeds

    def get_next(self) -> dict[str, Array] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The next run's inputs, None after the last."""
        return next(self._feeds, None)


def quantize(
    report: GraphReport, graph: Path, fp32: PackModel, golden: PackGolden, validation: Validation | None
) -> tuple[dict[str, PackModel], str]:
    """Quantize a pack's fp32 graph, calibrated on the golden examples.

    Args:
        report: The report on the fp32 graph.
        graph: The fp32 graph; the int8 graph is written beside it.
        fp32: The fp32 graph's measurements.
        golden: The bundle's answers.
        validation: Examples to measure the loss with; by default the golden examples.

    Returns:
        The models by precision: both, or fp32 alone if int8 is not smaller or loses too much; and the outcome in a
        sentence.
    """
    output = report.tensors.output
    if report.generate is not None or not report.tensors.is_plain:
        return {FP32: fp32}, (
            "int8 was not tried: the quantizer is calibrated for networks of one input and one output of fixed size "
            "that answer in one step."
        )
    if not report.outputs[0].labels:
        return {FP32: fp32}, "int8 was not tried: the output has no labels to measure its loss with."
    small = graph.with_name(MODEL_INT8)
    exact = report.network(graph)
    try:
        _quantize(graph, small, chain.from_iterable(map(exact.feeds, golden.inputs)), list(report.prepare_nodes))
    except Exception as error:  # noqa: BLE001 - the quantizer raises anything on graphs it does not support
        small.unlink(missing_ok=True)
        return {FP32: fp32}, f"this network cannot be quantized ({type(error).__name__}: {error})."
    quantized = report.network(small)
    int8 = measure(quantized, MODEL_INT8, golden, validation, output)
    # Measured alternately, because the speed of a shared machine varies.
    fp32 = replace(fp32, ms=min(fp32.ms, exact.median_ms(golden.inputs[0])))
    int8 = replace(int8, ms=min(int8.ms, quantized.median_ms(golden.inputs[0])))
    before, after = graph.stat().st_size, small.stat().st_size
    loss = _loss(fp32, int8)
    facts = (
        f"{after:,} bytes beside {before:,}, {loss * 100:.2g} points lost, {int8.ms:.3g} ms beside {fp32.ms:.3g} "
        f"for one input"
    )
    if len(report.outputs) > report.answers:
        # Accuracy and agreement compare labels alone.
        facts += f", embeddings with a cosine of {_least_cosine(exact, quantized, golden):.3f} or more to those of fp32"
    if after < before and loss <= MAX_LOSS:
        return {FP32: fp32, INT8: int8}, f"int8: {facts}."
    small.unlink()
    reason = "is no smaller" if after >= before else f"loses more than {MAX_LOSS * 100:.0f} point"
    return {FP32: fp32}, f"int8 {reason}, so the pack is without it: {facts}."


def _loss(fp32: PackModel, int8: PackModel) -> float:
    measured = "agreement" if fp32.accuracy is None else "accuracy"
    # Rounded, because the difference of 0.97 and 0.96 is not 0.01.
    return round(getattr(fp32, measured) - getattr(int8, measured), 6)


def _least_cosine(exact: PackedNetwork, quantized: PackedNetwork, golden: PackGolden) -> float:
    """The smallest cosine of an embedding in 8 bits with that in fp32, on the golden examples."""
    cosines: list[float] = []
    for given in golden.inputs:
        one, other = (network.answer(given)[1].astype(np.float64) for network in (exact, quantized))
        sizes = float(np.linalg.norm(one) * np.linalg.norm(other))
        cosines.append(float(one @ other) / sizes if sizes else 0.0)
    return min(cosines)


def _quantize(graph: Path, to: Path, feeds: Iterator[dict[str, Array]], excluded: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Folds batch norms into the convolutions before them, which quantizes both.
        folded = Path(folder) / "folded.onnx"
        quant_pre_process(graph, folded, skip_symbolic_shape=True)
        quantize_static(
            folded,
            to,
            _GoldenFeeds(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=OPERATIONS,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded,
        )
