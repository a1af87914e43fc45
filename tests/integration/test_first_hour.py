"""The first hour, from what a newcomer has: the wheel, the extras that the page names, and an empty folder."""

from pathlib import Path

import pytest

from tests.support.first_hour import PAGE, installed, shell_of_a_newcomer, typed, wrong_turns
from tests.support.pages import commands, goes_on_from


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_first_hour_has_no_wrong_turn(tmp_path: Path) -> None:
    assert wrong_turns(shell_of_a_newcomer(tmp_path)) == []


def test_the_first_hour_has_few_commands_and_begins_with_the_install() -> None:
    assert typed()[0].startswith("pip install ")
    assert len(typed()) <= 15
    assert goes_on_from(PAGE) is None
    assert {"tritonclient[http]", "numpy>=2.0"} <= set(installed())
    assert not [line for line in installed() if line.startswith("penstock")]


def test_a_command_that_fails_is_a_wrong_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one\none\n$ echo two\nthree\n$ false\n```\n")
    monkeypatch.setattr("tests.support.first_hour.PAGE", page)
    from tests.support.pages import Shell

    assert len(wrong_turns(Shell(tmp_path, tmp_path))) == 2
    assert len(list(commands("$ echo one\none\n"))) == 1
