"""The modules of the server's request path that are compiled when Penstock is installed, and whether they are.

They are those with a .pxd file beside them (decision 082).
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import final

# Environment variable: where it is neither empty nor 0, the interpreter runs the sources of the compiled modules too.
VARIABLE = "PENSTOCK_INTERPRETED"
# As measured with 64 and with 2,048 connections (decision 082).
MORE = "a quarter to two fifths"
FOLDER = Path(__file__).parent


@cache
def compiled_names() -> frozenset[str]:
    """Return the names of the modules that can be compiled."""
    paths = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.pxd"))
    return frozenset(".".join(("penstock.serve", *path.parts)) for path in paths)


def interpreter_wanted() -> bool:
    """Return whether the environment asks for the interpreter."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def interpret_all() -> None:
    """Let the interpreter run the sources of all modules that are imported from now on."""
    sys.meta_path.insert(0, _SourceFinder())


@final
class _SourceFinder:
    """Finds the source of a module before what was compiled of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in compiled_names() or not path:
            return None
        return spec_from_file_location(fullname, Path(path[0]) / f"{fullname.rpartition('.')[2]}.py")


def interpreted_note() -> str:
    """Return a sentence on the modules that are not compiled, or were compiled from other sources; empty if all are."""
    if interpreter_wanted():
        return f"the request path is interpreted, as {VARIABLE} says: a request takes {MORE} more of a core."
    modules = _modules()
    missing = sum(not hasattr(module, "COMPILED_FROM") for module in modules)
    if missing:
        return (
            f"{missing} of {len(modules)} modules of the request path are not compiled: a request takes {MORE} more of "
            "a core. Install a C compiler and the headers of Python, and then `pip install --force-reinstall --no-deps "
            "--no-cache-dir penstock-nn`; in a source tree `make setup`."
        )
    if stale := stale_names():
        return f"{', '.join(stale)} was changed after it was compiled: `make setup` compiles it again."
    return ""


def stale_names() -> list[str]:
    """Return the names of the modules that were compiled from another source than is there."""
    compiled = [module for module in _modules() if hasattr(module, "COMPILED_FROM")]
    return [module.__name__ for module in compiled if _digest(module.__name__) != module.COMPILED_FROM]


def _modules() -> list[ModuleType]:
    return [import_module(name) for name in sorted(compiled_names())]


def _digest(name: str) -> str:
    source = FOLDER.joinpath(*name.split(".")[2:])
    return hashlib.sha256(b"".join(source.with_suffix(kind).read_bytes() for kind in (".py", ".pxd"))).hexdigest()
