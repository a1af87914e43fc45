"""Ranges of a sweep: how they are typed, what is refused, and what a recipe makes of them."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import TrainError
from penstock.train.overrides import parse_settings, setting_text
from penstock.train.sweep.ranges import Choices, NumberRange, parse_space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[32, 64]", Choices(values=(32, 64))),
        ("[sgd, adamw]", Choices(values=("sgd", "adamw"))),
        ('["a b", none]', None),
        ("[none, 1.0]", Choices(values=(None, 1.0))),
        ("[true, 1]", Choices(values=(True, 1))),
        ("[[0.9, 0.99], [0.8, 0.9]]", Choices(values=([0.9, 0.99], [0.8, 0.9]))),
        ("range(0, 0.5)", NumberRange(low=0.0, high=0.5, is_log=False)),
        ("range(1, 8)", NumberRange(low=1, high=8, is_log=False)),
        ("log(1e-4, 1e-1)", NumberRange(low=1e-4, high=0.1, is_log=True)),
        ("log( 16 ,256 )", NumberRange(low=16, high=256, is_log=True)),
    ],
)
def test_what_is_typed_is_a_range(text: str, values: Choices | NumberRange | None) -> None:
    if values is None:
        with pytest.raises(TrainError, match="is no list of values"):
            parse_space([f"x={text}"])
        return
    space = parse_space([f"x={text}"])
    assert space.varied == {"x": values}
    assert parse_space([f"x={space.texts()['x']}"]).varied == space.varied


@pytest.mark.parametrize(
    "value", [1, 0.1, 1e-05, True, None, "adamw", "a b", "1", "true", "", " x", 'say "é"', [1, 2.5]]
)
def test_a_value_survives_being_typed(value: Any) -> None:
    assert parse_settings([f"name={setting_text(value)}"]) == {"name": value}


def test_what_is_no_range_stays_fixed(tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text('epochs = 3\nseed = 1\n[optimizer]\nlr = "log(1e-4, 1e-1)"\nname = "sgd"\n')
    space = parse_space(["seed=2", "batch_size=[16]", "optimizer.betas=[[0.9, 0.99]]", "clip_norm=none"], config)
    assert space.fixed == {
        "epochs": 3,
        "seed": 2,
        "batch_size": 16,
        "optimizer.name": "sgd",
        "optimizer.betas": [0.9, 0.99],
        "clip_norm": None,
    }
    assert list(space.varied) == ["optimizer.lr"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "--set has 'x'; write NAME=VALUE"),
        ("x=", "--set has 'x='"),
        ("x=uniform(0, 1)", r"there is no range 'uniform'; write \[a, b, c\], range\(low, high\) or log"),
        ("x=__import__(os)", "there is no range '__import__'"),
        ("x=range(1)", "a range has two numbers"),
        ("x=range(1, 2, 3)", "a range has two numbers"),
        ("x=range(1, abc)", "a range has two numbers"),
        ("x=range(0, inf)", "a range has two numbers"),
        ("x=range(nan, 1)", "a range has two numbers"),
        ("x=range(2, 1)", "must be below the second"),
        ("x=log(0, 1)", "must begin above 0"),
        ("x=[]", "a list without choices"),
        ("x=[1, 1]", "has the choice 1 twice"),
        ("x=[a,,b]", "no list of values"),
        ("x=3", "the sweep varies nothing"),
        ("loss=[1, 2]", "'loss' of a recipe is no single value"),
    ],
)
def test_what_is_no_range_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        parse_space([text])


def test_combinations_are_counted_where_there_are_few() -> None:
    space = parse_space(["a=[1, 2]", "b=range(1, 3)"])
    found = space.combinations(6)
    assert found is not None
    assert (len(found), found[0], found[-1]) == (6, {"a": 1, "b": 1}, {"a": 2, "b": 3})
    assert space.combinations(5) is None
    assert parse_space(["a=[1, 2]", "b=range(0.0, 1)"]).combinations(10**9) is None


def test_every_end_is_tried_beside_every_name() -> None:
    space = parse_space(["optimizer.name=[sgd, adamw]", "optimizer.lr=log(0.1, 1)", "batch_size=[1, 2, 3]"])
    probes = list(space.probes())
    assert len(probes) == 2 * (1 + 1 + 2)
    for name in ("sgd", "adamw"):
        own = [each for each in probes if each["optimizer.name"] == name]
        assert {each["optimizer.lr"] for each in own} == {0.1, 1.0}
        assert {each["batch_size"] for each in own} == {1, 2, 3}
