"""The measurements of this project: benchmarks/results, one file for each area."""

import json
from pathlib import Path
from typing import Any

from penstock.bench.measurement import Comparison, Measurement, append
from penstock.core.errors import BenchError

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def record_result(measurement: Measurement, area: str) -> None:
    """Append a measurement to benchmarks/results/AREA.jsonl."""
    append(measurement, RESULTS / f"{area}.jsonl")


def read_results(folder: Path = RESULTS) -> list[Measurement]:
    """Read every line of every file, in order.

    Raises:
        BenchError: A line is malformed.
    """
    measurements: list[Measurement] = []
    for file in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(file.read_text().splitlines(), 1):
            try:
                fields: dict[str, Any] = json.loads(text)
                fields["peer"] = Comparison(**fields["peer"]) if fields["peer"] else None
                measurements.append(Measurement(**fields))
            except (ValueError, TypeError, KeyError) as error:
                raise BenchError(f"{file.name}:{number} is not a measurement ({error}); remove or mend it.") from None
    return measurements
