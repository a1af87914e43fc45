"""Whether a command goes on with a run: options, lengths, and code without its comments."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.train.same_run import changed_sources, differences, is_longer, next_folder

APP = """
from penstock import Application, TensorSpec

app = Application(
    name="some",
    input=TensorSpec(dtype="float32", shape=(2,), meaning="numbers"),
    output=TensorSpec(dtype="float32", shape=(1,), meaning="a number"),
    model="some:Net",
)
"""


@pytest.fixture
def found(tmp_path: Path) -> FoundApplication:
    return written(tmp_path, APP)


def written(folder: Path, text: str) -> FoundApplication:
    file = folder / "some_app.py"
    file.write_text(text)
    return find_application(str(file))


def fields(found: FoundApplication, **overrides: Any) -> dict[str, Any]:
    return {
        "application": found.reference,
        "sources": found.source_sha256(),
        "code": found.code_sha256(),
        "overrides": overrides,
        "recipe": {"epochs": 5},
        "total_steps": 100,
    }


@pytest.mark.parametrize(
    ("given", "now", "phrase"),
    [
        ({"seed": 1}, {"seed": 1}, ""),
        ({}, {"seed": 1}, "seed is 1, the run's is the recipe's"),
        ({"precision": "bf16"}, {}, "precision is the recipe's, the run's is bf16"),
        ({}, {"loading.workers": 3}, ""),
        ({}, {"epochs": 6}, ""),
        ({}, {"epochs": 4.0}, "epochs is 4, the run's is the recipe's 5"),
        ({}, {"epochs": 4.5}, "epochs is 4.5, the run's is the recipe's 5"),
        ({}, {"epochs": 5.0}, ""),
        ({"steps": 100}, {"steps": 101}, ""),
        ({"steps": 100}, {"steps": 99}, "steps is 99, the run's is 100"),
    ],
)
def test_differences_are_named(
    found: FoundApplication, given: dict[str, Any], now: dict[str, Any], phrase: str
) -> None:
    assert differences(fields(found, **given), found, now) == ([phrase] if phrase else [])


def test_more_steps_or_epochs_are_longer(found: FoundApplication) -> None:
    said = fields(found)
    assert is_longer(said, {"epochs": 6})
    assert is_longer(said, {"steps": 101})
    assert not is_longer(said, {"epochs": 5})
    assert not is_longer(said, {})


def test_another_application_is_another_run(found: FoundApplication) -> None:
    said = fields(found) | {"application": "digits"}
    assert differences(said, found, {}) == [f"the application is {found.reference}, the run's is digits"]


def test_a_comment_is_no_change_and_a_number_is_one(tmp_path: Path, found: FoundApplication) -> None:
    said = fields(found)
    assert changed_sources(said, written(tmp_path, f"# More.\n{APP}")) == []
    other = written(tmp_path, APP.replace("(2,)", "(3,)"))
    assert changed_sources(said, other) == ["some_app.py"]
    # Runs of older versions have no hashes of the code.
    del said["code"]
    assert changed_sources(said, other) == ["some_app.py"]


def test_the_next_folder_does_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "run-2").mkdir()
    assert next_folder(tmp_path / "run") == tmp_path / "run-3"
