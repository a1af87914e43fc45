"""Source files of an application: the declaring file, and the modules in its folder that it imports.

Imports are read from the source text, not from loaded modules, so that the result is the same in every process.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.core.errors import ApplicationError
from penstock.core.source_files.pinned_sources import is_source, read_source
from penstock.core.source_files.source_imports import PLAIN, import_statements

_INSTALLED = {"site-packages", "dist-packages"}


def local_modules(home: Path, package: str, roots: Iterable[str]) -> dict[str, Path]:
    """Find the modules in an application's folder or below that it imports, directly or not, by import name.

    Args:
        home: The file that declares the application.
        package: The file's package; empty where the folder itself is on `sys.path`.
        roots: Import names of further modules of the application.
    """
    if not package and home.parent.name in _INSTALLED:
        return {}
    prefix = f"{package}." if package else ""
    modules: dict[str, Path] = {}
    todo = [*_imports(home, f"{prefix}{home.stem}"), *roots]
    while todo:
        name = todo.pop()
        ours = name.startswith(prefix) and (package or name.partition(".")[0] != "penstock")
        file = _file(home.parent, name.removeprefix(prefix)) if ours else None
        if file is not None and name not in modules:
            modules[name] = file
            todo += _imports(file, name)
    return modules


def check_loaded_modules(modules: dict[str, Path]) -> None:
    """Check that Python has loaded no other file under the name of an application's module.

    Raises:
        ApplicationError: It has; for example, two applications both have a `model.py` beside them.
    """
    for name, file in modules.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and Path(loaded).resolve() != file:
            raise ApplicationError(
                f"{file} is imported as {name!r}, but this process has loaded {loaded} by that name; rename one of the "
                f"two files, or use a process for each."
            )


def _imports(file: Path, name: str) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for module, level, names in import_statements(read_source(file)):
        if level == PLAIN:
            for each in names:
                yield from _with_parents(each)
        else:
            above = package.split(".")[: -(level - 1) or None] if level else []
            base = ".".join([*above, *([module] if module else [])])
            yield from _with_parents(base)
            # `from package import module` looks like `from module import name`; names without a file are dropped.
            yield from (f"{base}.{each}" for each in names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _file(folder: Path, name: str) -> Path | None:
    path = folder.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for each in candidates if name and is_source(file := each.resolve())), None)
