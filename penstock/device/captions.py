"""Answers as one line of text or JSON."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.pictures.boxes import FoundBox, found_line
from penstock.core.spec import TensorSpec
from penstock.device.listen import ChunkResult
from penstock.device.tensor_captions import numbers_json, tensor_line
from penstock.device.watch import FrameAnswer, FrameResult

# Decimal places of a box's sides in pixels, and of a score.
PLACES, SCORE_PLACES = 2, 4


def answer_line(answer: FrameAnswer) -> str:
    """An answer in words: `dog, beagle (87%)`, `dog (91%)`, `unsure (cat 38%)`, or `2 cars, 1 person`."""
    if isinstance(answer, tuple):
        return found_line(answer)
    if answer["unsure"]:
        label, probability = answer["top"][0]
        return f"unsure ({label} {probability:.0%})"
    if answer["label"] is None:
        return f"{answer['group']} ({answer['group_probability']:.0%})"
    if answer["label"] == answer["group"]:
        return f"{answer['label']} ({answer['probability']:.0%})"
    return f"{answer['group']}, {answer['label']} ({answer['probability']:.0%})"


def answer_key(answer: FrameAnswer) -> Any:
    """The words of an answer without its numbers: another key is another answer."""
    return found_line(answer) if isinstance(answer, tuple) else (answer["group"], answer["label"])


def frame_json(result: FrameResult) -> str:
    """One line of JSON: the frame, its time, the age of the answer, the network's time, and the answer."""
    frame = result.frame
    fields: dict[str, Any] = {"frame": frame.number, "time_s": round(frame.time_s, 6)}
    if frame.name:
        fields["file"] = frame.name
    height, width = result.pixels.shape[:2]
    answer = result.answer
    named = {"boxes": [_box_json(each) for each in answer]} if isinstance(answer, tuple) else answer
    fields |= {"width": width, "height": height, **_times(result), **named}
    return json.dumps(fields, ensure_ascii=False)


def _box_json(found: FoundBox) -> dict[str, Any]:
    sides = [round(side, PLACES) for side in found.box]
    return {"label": found.label, "class": found.kind, "score": round(found.score, SCORE_PLACES), "box": sides}


def chunk_line(spec: TensorSpec, result: ChunkResult) -> str:
    """The time of a chunk and the labels that begin in it, or the last frame of an output without labels.

    Returns:
        The line; empty if there is nothing to print.
    """
    if result.labels is not None:
        return f"{result.chunk.time_s:8.2f} s  {' '.join(result.labels)}" if result.labels else ""
    if not len(result.output_U):
        return ""
    frame = replace(spec, shape=spec.shape[1:], labels=spec.labels if len(spec.shape) > 1 else ())
    return f"{result.chunk.time_s:8.2f} s  {tensor_line(frame, np.asarray(result.output_U[-1]))}"


def chunk_json(result: ChunkResult) -> str:
    """One line of JSON: the chunk, its time, the age of the answer, the network's time, and new labels or numbers."""
    chunk = result.chunk
    fields: dict[str, Any] = {"chunk": chunk.number, "time_s": round(chunk.time_s, 6), "frames": len(result.output_U)}
    if result.labels is None:
        fields["output"] = numbers_json(result.output_U)
    else:
        fields["labels"] = list(result.labels)
    return json.dumps(fields | _times(result), ensure_ascii=False)


def _times(result: FrameResult | ChunkResult) -> dict[str, float]:
    times_s = {"model_ms": result.model_s, "age_ms": result.age_s}
    return {name: round(1e3 * time_s, 3) for name, time_s in times_s.items() if time_s is not None}
