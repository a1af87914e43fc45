"""Compiled modules: whether they are compiled, from which sources, and that their classes are those of the sources."""

import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import MemberDescriptorType

import pytest

from penstock.serve import compiled
from penstock.serve.frontend import table_writer

# Prints the names of the fields of each dataclass, in order, and of the methods of each class.
CLASSES = """
import json
from tests.unit.test_compiled import classes
print(json.dumps(classes()))
"""


def classes() -> dict[str, list[list[str]]]:
    """The fields of each class of the compiled modules, if it is a dataclass, and its public methods."""
    found: dict[str, list[list[str]]] = {}
    for name in sorted(compiled.compiled_names()):
        for cls in vars(import_module(name)).values():
            if isinstance(cls, type) and cls.__module__ == name:
                names = [field.name for field in fields(cls)] if is_dataclass(cls) else []
                public = [each for each in vars(cls).items() if each[0][0] != "_"]
                # Slots are not the same.
                methods = sorted(key for key, value in public if not isinstance(value, MemberDescriptorType))
                found[f"{name}.{cls.__qualname__}"] = [names, methods]
    return found


def interpreted(code: str) -> str:
    environment = os.environ | {compiled.VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_compiled_class_has_the_fields_of_its_source_in_the_same_order() -> None:
    """They are the parameters of the class: Cython takes their order from the .pxd file."""
    source = json.loads(interpreted(CLASSES))
    assert len(source) > 9
    for name, (names, methods) in classes().items():
        assert names == source[name][0], name
        assert set(source[name][1]) <= set(methods), name


def test_the_interpreter_runs_the_sources_where_that_is_wanted() -> None:
    code = (
        "from penstock.serve.compiled import interpreted_note\n"
        "from penstock.serve.frontend import table_writer\n"
        "print(table_writer.__file__); print(interpreted_note())"
    )
    path, note = interpreted(code).splitlines()
    assert path == str(Path(table_writer.__file__).with_name("table_writer.py"))
    assert note.startswith("the request path is interpreted, as PENSTOCK_INTERPRETED says")


def test_what_was_compiled_from_another_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_compiled", lambda name: True)
    monkeypatch.setattr(table_writer, "COMPILED_FROM", "another", raising=False)
    assert compiled.stale_names() == ["penstock.serve.frontend.table_writer"]
    assert compiled.interpreted_note().startswith(
        "penstock.serve.frontend.table_writer was changed after it was compiled"
    )


def test_a_module_is_compiled_where_python_would_import_it_so() -> None:
    for name in compiled.compiled_names():
        assert compiled.is_compiled(name) == hasattr(import_module(name), "COMPILED_FROM")


def test_a_module_in_c_that_was_compiled_from_another_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.c_names() == {"penstock.core.pictures.picture_resample"}
    if not compiled.is_compiled("penstock.core.pictures.picture_resample"):
        pytest.skip("not compiled")
    assert compiled.stale_names() == []
    monkeypatch.setattr("penstock.core.pictures.picture_resample.COMPILED_FROM", "another")
    assert compiled.stale_names() == ["penstock.core.pictures.picture_resample"]


def test_the_note_imports_no_module() -> None:
    code = (
        "import sys; from penstock.serve.compiled import compiled_names, interpreted_note; interpreted_note(); "
        "print(sorted(compiled_names() & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_modules_that_are_not_compiled_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_compiled", lambda name: True)
    assert compiled.interpreted_note() == ""
    monkeypatch.setattr(compiled, "is_compiled", lambda name: name != table_writer.__name__)
    count = len(compiled.compiled_names() | compiled.c_names())
    assert compiled.interpreted_note().startswith(f"1 of {count} modules of the request path")
