"""Records read from JSON by the type hints of their fields."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.core import json_record
from penstock.core.json_record import compute_hints, read_record, record_json
from penstock.core.prepare import RawSpec


@dataclass(frozen=True)
class Holder:
    raw: RawSpec
    sizes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Record:
    share: float
    initial: bool | float = 0
    inner: Inner | None = None
    sizes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"share": 0.5}, Record(0.5)),
        ({"share": 1, "initial": True}, Record(1, True)),
        ({"share": 1.0, "initial": 2.5, "inner": None}, Record(1.0, 2.5)),
        ({"share": 1.0, "inner": {"size": 3}, "sizes": [1, 2]}, Record(1.0, 0, Inner(3), (1, 2))),
    ],
)
def test_a_record_is_read(fields: dict[str, Any], expected: Record) -> None:
    assert read_record(Record, fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": True}, "a field is of another type: True"),
        ({"share": "1"}, "a field is of another type: '1'"),
        ({"share": 1.0, "initial": "x"}, "a field is of another type: 'x'"),
        ({"share": 1.0, "inner": {"size": 1.5}}, "a field is of another type: 1.5"),
        ({"share": 1.0, "sizes": [1, "2"]}, "a field is of another type: '2'"),
        ({"share": 1.0, "colour": 1}, "unknown field 'colour'"),
        ([1], r"\[1\] is no object"),
    ],
)
def test_another_type_is_named(fields: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_record(Record, fields)


def test_what_is_written_is_read_without_derived_fields() -> None:
    raw = RawSpec(dtype="uint8", shape=(None, 4), max_shape=(9, 4), meaning="pixels")
    written = record_json(Holder(raw=raw, sizes={"a": (1, 2)}))
    assert json.loads(json.dumps(written)) == written
    assert "name" not in written["raw"]
    assert read_record(Holder, written) == Holder(raw=raw, sizes={"a": (1, 2)})


def test_hints_that_were_computed_ahead_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Part:
        size: int

    @dataclass(frozen=True)
    class Whole:
        first: int
        parts: tuple[Part, ...] = ()
        other: Part | None = None

    monkeypatch.setattr(json_record, "get_type_hints", lambda kind: vars(kind)["__annotations__"])
    compute_hints(Whole)
    monkeypatch.delattr(json_record, "get_type_hints")
    given = {"first": 1, "parts": [{"size": 2}], "other": {"size": 3}}
    assert read_record(Whole, given) == Whole(1, (Part(2),), Part(3))
