"""The compiled modules of the server's request path: what is compiled, what is not, and what is out of date.

They are those with a .pxd file beside them (decision 082), and those in C, which others stand in for (decision 083).
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import final

# Environment variable: where it is neither empty nor 0, the interpreter runs the sources of the compiled modules too.
VARIABLE = "PENSTOCK_INTERPRETED"
# As measured with 64 and with 2,048 connections (decision 082).
MORE = "a quarter to two fifths"
FOLDER = Path(__file__).parents[1]


@cache
def compiled_names() -> frozenset[str]:
    """Return the names of the modules that can be compiled, and are Python."""
    return _names(".pxd")


@cache
def c_names() -> frozenset[str]:
    """Return the names of the modules in C."""
    return _names(".c")


def _names(kind: str) -> frozenset[str]:
    paths = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob(f"*{kind}"))
    return frozenset(".".join(("penstock", *path.parts)) for path in paths)


def interpreter_wanted() -> bool:
    """Return whether the environment asks for the interpreter."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def interpret_all() -> None:
    """Let the interpreter run the sources of all modules that are imported from now on."""
    sys.meta_path.insert(0, _SourceFinder())


@final
class _SourceFinder:
    """Finds the source of a module before what was compiled from it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in compiled_names() or not path:
            return None
        return spec_from_file_location(fullname, Path(path[0]) / f"{fullname.rpartition('.')[2]}.py")


def interpreted_note() -> str:
    """Return a sentence on the modules that are not compiled; empty if all are.

    Of those that this process has imported, it names those that were compiled from other sources, too. It imports none:
    a supervisor needs few of them.
    """
    if interpreter_wanted():
        return f"the request path is interpreted, as {VARIABLE} says: a request takes {MORE} more of a core."
    names = compiled_names() | c_names()
    missing = sum(not is_compiled(name) for name in names)
    if missing:
        return (
            f"{missing} of {len(names)} modules of the request path are not compiled: a request takes {MORE} more of "
            "a core. Install a C compiler and the headers of Python, and then `pip install --force-reinstall --no-deps "
            "--no-cache-dir penstock-nn`; in a source tree `make setup`."
        )
    if stale := _stale(sys.modules[name] for name in sorted(names) if name in sys.modules):
        return f"{', '.join(stale)} was changed after it was compiled: `make setup` compiles it again."
    return ""


def stale_names() -> list[str]:
    """Import all modules; return the names of those that were compiled from another source than is there."""
    names = compiled_names() | {name for name in c_names() if is_compiled(name)}
    return _stale(import_module(name) for name in sorted(names))


def is_compiled(name: str) -> bool:
    """Return whether Python finds a compiled module of this name."""
    return any(_path(name).with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)


def _stale(modules: Iterable[ModuleType]) -> list[str]:
    compiled = [module for module in modules if hasattr(module, "COMPILED_FROM")]
    return [module.__name__ for module in compiled if _digest(module.__name__) != module.COMPILED_FROM]


def _path(name: str) -> Path:
    """Return the path of a module without the end of its file's name."""
    return FOLDER.joinpath(*name.split(".")[1:])


def _digest(name: str) -> str:
    kinds = (".c",) if name in c_names() else (".py", ".pxd")
    contents = (_path(name).with_suffix(kind).read_bytes() for kind in kinds)
    return hashlib.sha256(b"".join(contents)).hexdigest()
