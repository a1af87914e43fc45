"""Records read from JSON values by their type hints."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.core.json_record import read_record


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    sizes: tuple[int, ...] = ()
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    kind: Literal["one", "other"] = "one"
    inner: Inner | None = None
    by_name: dict[str, Inner] | None = None
    file: Path | None = None
    pair: tuple[str, int] = ("", 0)


FULL = Outer(
    name="a", kind="other", inner=Inner(sizes=(1, 2), share=3), by_name={"b": Inner()}, file=Path("c"), pair=("d", 4)
)


def test_a_record_is_what_it_was() -> None:
    assert read_record(Outer, json.loads(json.dumps(asdict(FULL), default=str))) == FULL
    assert read_record(Outer, {"name": "a"}) == Outer(name="a")


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        {"name": 1},
        {"name": "a", "unknown": 1},
        {"name": "a", "kind": "third"},
        {"name": "a", "inner": []},
        {"name": "a", "inner": {"sizes": 3}},
        {"name": "a", "inner": {"sizes": [1.5]}},
        {"name": "a", "inner": {"sizes": [True]}},
        {"name": "a", "inner": {"share": "half"}},
        {"name": "a", "inner": {"share": 10**400}},
        {"name": "a", "by_name": {"b": None}},
        {"name": "a", "file": 3},
    ],
)
def test_a_field_of_another_type_is_refused(fields: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        read_record(Outer, fields)
