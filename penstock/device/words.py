"""What is seen, said in a line."""

import json
from typing import Any

from penstock.device.listen import HeardChunk
from penstock.device.watch import Seen


def line_of(shown: dict[str, Any]) -> str:
    """`dog, beagle (87%)`, `dog (91%)`, or `unsure (cat 38%)`."""
    if shown["unsure"]:
        label, probability = shown["top"][0]
        return f"unsure ({label} {probability:.0%})"
    if shown["label"] is None:
        return f"{shown['group']} ({shown['group_probability']:.0%})"
    if shown["label"] == shown["group"]:
        return f"{shown['label']} ({shown['probability']:.0%})"
    return f"{shown['group']}, {shown['label']} ({shown['probability']:.0%})"


def json_of(seen: Seen) -> str:
    """One line of JSON: the frame, its time, the answer's age and the network's time, and what is shown."""
    frame = seen.frame
    fields: dict[str, Any] = {"frame": frame.number, "time_s": round(frame.time_s, 6)}
    if frame.name:
        fields["file"] = frame.name
    height, width = seen.pixels.shape[:2]
    fields |= {"width": width, "height": height, "model_ms": round(1e3 * seen.model_s, 3)}
    if seen.age_s is not None:
        fields["age_ms"] = round(1e3 * seen.age_s, 3)
    return json.dumps(fields | seen.shown, ensure_ascii=False)


def heard_line(heard: HeardChunk) -> str:
    """The labels that a chunk begins and its time; empty if there is none."""
    return f"{heard.chunk.time_s:8.2f} s  {' '.join(heard.told)}" if heard.told else ""


def heard_json(heard: HeardChunk) -> str:
    """One line of JSON: the chunk, its time, the answer's age and the network's time, and what is new."""
    chunk = heard.chunk
    fields: dict[str, Any] = {
        "chunk": chunk.number,
        "time_s": round(chunk.time_s, 6),
        "frames": len(heard.output_U),
        "told": list(heard.told),
        "model_ms": round(1e3 * heard.model_s, 3),
    }
    if heard.age_s is not None:
        fields["age_ms"] = round(1e3 * heard.age_s, 3)
    return json.dumps(fields, ensure_ascii=False)
