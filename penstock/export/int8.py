"""A pack's network in 8 bits: kept where it is smaller and loses no more than a point of what it knows."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import final

from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from penstock.core.pack import FP32, INT8, MODEL_INT8, PackGolden, PackModel
from penstock.core.spec import Array
from penstock.export.described import Described
from penstock.export.packed import Validation, measured

# What is multiplied a lot; whatever else there is stays as exact as it was.
OPERATIONS = ["Conv", "Gemm", "MatMul"]
MOST_LOST = 0.01


@final
class _Examples(CalibrationDataReader):
    """What goes into the network where it runs on the golden examples."""

    def __init__(self, feeds: Iterator[dict[str, Array]]) -> None:
        self._feeds = feeds

    def get_next(self) -> dict[str, Array] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The next run's inputs, None behind the last."""
        return next(self._feeds, None)


def with_int8(
    described: Described, graph: Path, fp32: PackModel, golden: PackGolden, validation: Validation | None
) -> tuple[dict[str, PackModel], str]:
    """Try 8 bits beside a pack's fp32 graph, calibrated by the golden examples.

    Args:
        described: What is said of the fp32 graph.
        graph: The fp32 graph; the other one goes beside it.
        fp32: What was measured of it.
        golden: The bundle's answers.
        validation: Examples to see by what 8 bits lose; the golden answers alone where there are none.

    Returns:
        The models by precision: both, or fp32 alone where 8 bits are no gain or lose too much; and what became of them,
        in a sentence.
    """
    if not described.outputs[0].labels:
        return {FP32: fp32}, "8 bits were not tried: the output has no labels by which to see what they lose."
    small = graph.with_name(MODEL_INT8)
    exact = described.network(graph)
    try:
        _quantize(graph, small, chain.from_iterable(map(exact.feeds, golden.inputs)), list(described.prepared_by))
    except Exception as error:  # noqa: BLE001 - the quantizer raises whatever it meets
        small.unlink(missing_ok=True)
        return {FP32: fp32}, f"8 bits cannot be made of this network ({type(error).__name__}: {error})."
    quantized = described.network(small)
    int8 = measured(quantized, MODEL_INT8, golden, validation, labelled=True)
    # Measured in turns: the speed of a machine that others use changes from one moment to the next.
    fp32 = replace(fp32, ms=min(fp32.ms, exact.median_ms(golden.inputs[0])))
    int8 = replace(int8, ms=min(int8.ms, quantized.median_ms(golden.inputs[0])))
    before, after = graph.stat().st_size, small.stat().st_size
    lost = _lost(fp32, int8)
    facts = (
        f"{after:,} bytes beside {before:,}, {lost * 100:.2g} points lost, {int8.ms:.3g} ms beside {fp32.ms:.3g} "
        f"for one input"
    )
    if after < before and lost <= MOST_LOST:
        return {FP32: fp32, INT8: int8}, f"8 bits: {facts}."
    small.unlink()
    reason = "are no smaller" if after >= before else f"lose more than {MOST_LOST * 100:.0f} point"
    return {FP32: fp32}, f"8 bits {reason}, so the pack has none of them: {facts}."


def _lost(fp32: PackModel, int8: PackModel) -> float:
    if fp32.accuracy is not None and int8.accuracy is not None:
        return fp32.accuracy - int8.accuracy
    assert fp32.agreement is not None
    assert int8.agreement is not None
    return fp32.agreement - int8.agreement


def _quantize(graph: Path, to: Path, feeds: Iterator[dict[str, Array]], excluded: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Batch norms go into the convolutions before them, so that they are of 8 bits too.
        folded = Path(folder) / "folded.onnx"
        quant_pre_process(graph, folded, skip_symbolic_shape=True)
        quantize_static(
            folded,
            to,
            _Examples(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=OPERATIONS,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded,
        )
