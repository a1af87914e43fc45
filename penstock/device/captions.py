"""Answers as one line of text or JSON."""

import json
from typing import Any

from penstock.device.listen import ChunkResult
from penstock.device.watch import FrameResult


def answer_line(answer: dict[str, Any]) -> str:
    """An answer in words: `dog, beagle (87%)`, `dog (91%)`, or `unsure (cat 38%)`."""
    if answer["unsure"]:
        label, probability = answer["top"][0]
        return f"unsure ({label} {probability:.0%})"
    if answer["label"] is None:
        return f"{answer['group']} ({answer['group_probability']:.0%})"
    if answer["label"] == answer["group"]:
        return f"{answer['label']} ({answer['probability']:.0%})"
    return f"{answer['group']}, {answer['label']} ({answer['probability']:.0%})"


def frame_json(result: FrameResult) -> str:
    """One line of JSON: the frame, its time, the age of the answer, the network's time, and the answer."""
    frame = result.frame
    fields: dict[str, Any] = {"frame": frame.number, "time_s": round(frame.time_s, 6)}
    if frame.name:
        fields["file"] = frame.name
    height, width = result.pixels.shape[:2]
    fields |= {"width": width, "height": height, **_times(result), **result.answer}
    return json.dumps(fields, ensure_ascii=False)


def chunk_line(result: ChunkResult) -> str:
    """The time of a chunk and the labels that begin in it; empty if there are none."""
    return f"{result.chunk.time_s:8.2f} s  {' '.join(result.labels)}" if result.labels else ""


def chunk_json(result: ChunkResult) -> str:
    """One line of JSON: the chunk, its time, the age of the answer, the network's time, and the new labels."""
    chunk = result.chunk
    fields: dict[str, Any] = {
        "chunk": chunk.number,
        "time_s": round(chunk.time_s, 6),
        "frames": len(result.output_U),
        "labels": list(result.labels),
        **_times(result),
    }
    return json.dumps(fields, ensure_ascii=False)


def _times(result: FrameResult | ChunkResult) -> dict[str, float]:
    times_s = {"model_ms": result.model_s, "age_ms": result.age_s}
    return {name: round(1e3 * time_s, 3) for name, time_s in times_s.items() if time_s is not None}
