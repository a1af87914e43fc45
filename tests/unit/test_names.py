"""A module or a public class of Penstock is found by its name alone: none has the name of another."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Folders of one layout: a file is named after its part, as `penstock/apps/digits/model.py`.
SAME_LAYOUT = ("penstock/apps/", "penstock/kernels/")
# A command is named after the module that it calls.
COMMANDS = "penstock/cli/"
# Named by Python.
SPECIAL = {"__init__", "__main__"}
# To be renamed; nothing is added here.
REMAINING = {"Comparison"}


def sources() -> list[Path]:
    files = (file.relative_to(ROOT) for file in sorted((ROOT / "penstock").rglob("*.py")))
    return [file for file in files if not file.as_posix().startswith(SAME_LAYOUT)]


def named_twice(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, file in names:
        found[name].append(file.as_posix())
    return {name: files for name, files in found.items() if len(files) > 1}


def classes() -> Iterator[tuple[str, Path]]:
    for file in sources():
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, file


def test_no_module_has_the_name_of_another() -> None:
    files = [file for file in sources() if file.stem not in SPECIAL and not file.as_posix().startswith(COMMANDS)]
    assert named_twice((file.stem, file) for file in files) == {}


def test_no_public_class_has_the_name_of_another() -> None:
    found = named_twice(classes())
    assert {name: files for name, files in found.items() if name not in REMAINING} == {}
