"""Run the page of the first hour with what a newcomer installs: the wheel, the extras it names, an empty home."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from tests.support.pages import EXAMPLES, ROOT, Shell, commands
from tests.support.wheel import bare, build, copy_of_sources, environment

PAGE = ROOT / "docs" / "tutorial" / "first-hour.md"
TYPED = re.compile(r"^\$ (.+)$", re.MULTILINE)
INSTALL = re.compile(r"^pip install (?P<requirements>.+)$")


def typed(page: Path = PAGE) -> list[str]:
    """Every command that the page has a reader type."""
    return TYPED.findall(page.read_text().replace("\\\n", " "))


def installed(page: Path = PAGE) -> list[str]:
    """The requirements that the page installs: those of the extras, and other packages."""
    (line,) = (found["requirements"] for command in typed(page) if (found := INSTALL.match(command)))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements: list[str] = declared["dependencies"]
    waiting = re.findall(r'[^\s"]+', line)
    while waiting:
        one = waiting.pop()
        extras = re.fullmatch(r"penstock-nn\[(.+)\]", one)
        if extras is None:
            requirements.append(one)
        else:
            waiting += [more for extra in extras[1].split(",") for more in declared["optional-dependencies"][extra]]
    return requirements


def shell_of_a_newcomer(folder: Path) -> Shell:
    """Install the wheel of this tree, and return a shell in an empty folder that finds it alone.

    Args:
        folder: Is filled with the environment, an empty home and the shell's folder.
    """
    (folder / "sources").mkdir()
    wheel = build(copy_of_sources(folder / "sources"), folder / "wheels")
    python = environment(folder / "environment", wheel, installed())
    for name in ("home", "work"):
        (folder / name).mkdir()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    variables = {name: value for name, value in bare().items() if not name.startswith(("PENSTOCK", "XDG"))}
    return Shell(folder / "work", folder, variables | {"HOME": str(folder / "home"), "PATH": path})


def wrong_turns(shell: Shell) -> list[str]:
    """Run the page; return what went wrong, a text for each command that failed or printed something else."""
    found: list[str] = []
    parsed = EXAMPLES.parse(PAGE)
    parsed.namespace["shell"] = shell
    for example in parsed.examples():
        if example.region.lexemes["language"] == "console":
            for command, expected in commands(str(example.parsed)):
                try:
                    shell.run(command, expected)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    found.append(str(error) or f"$ {command}")
        else:
            assert example.region.lexemes["title"], "the page runs Python in files alone"
            example.evaluate()
    try:
        shell.stop()
    except AssertionError as error:
        found.append(str(error))
    return found
