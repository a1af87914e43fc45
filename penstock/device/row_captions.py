"""Answers of rows as one line of text or JSON."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.core.packs.pack import Pack
from penstock.core.scores import are_scores
from penstock.core.spec import TensorSpec
from penstock.device.captions import answer_line
from penstock.device.row_run import RowResult
from penstock.device.tensor_captions import numbers_json, tensor_line


def row_line(pack: Pack, result: RowResult) -> str:
    """`line 3: setosa (97%)`; numbers have the names that labels give them, and their units."""
    return f"line {result.row.line}: {_answer(pack, result)}"


def row_json(pack: Pack, result: RowResult) -> str:
    """One line of JSON: the row, its line, the network's time, the answer of a classifier, and the outputs."""
    fields: dict[str, Any] = {"row": result.row.number, "line": result.row.line}
    fields["model_ms"] = round(1e3 * result.model_s, 3)
    first = pack.outputs[0]
    if result.text is not None:
        fields["text"] = result.text
    elif pack.recognition is not None:
        fields |= pack.recognition.answer(result.outputs[first.name])
    elif are_scores(first) and result.outputs[first.name].ndim == 1:
        fields["label"] = first.labels[int(result.outputs[first.name].argmax())]
    outputs = {name: numbers_json(array) for name, array in result.outputs.items()}
    return json.dumps(fields | ({"outputs": outputs} if outputs else {}), ensure_ascii=False)


def _answer(pack: Pack, result: RowResult) -> str:
    if result.text is not None:
        return result.text
    if pack.recognition is not None:
        return answer_line(pack.recognition.answer(result.outputs[pack.outputs[0].name]))
    specs: Sequence[TensorSpec] = pack.outputs[: pack.answers]
    if len(specs) == 1:
        return tensor_line(specs[0], result.outputs[specs[0].name])
    return "; ".join(f"{spec.name}: {tensor_line(spec, result.outputs[spec.name])}" for spec in specs)
