"""Source files of an application that was not imported: where they are, and what has changed in them.

Whoever made a bundle chose the application that it names, so that nothing is imported for it before all of its sources
are those that the bundle recorded.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, final

from penstock.core.errors import ApplicationError
from penstock.core.source_files.app_sources import local_modules
from penstock.core.source_files.find_application import application_names, code_of, names_file, reference_parts
from penstock.core.source_files.pinned_sources import is_source, pinned_source
from penstock.core.source_files.source_imports import PLAIN, import_statements
from penstock.core.storage.regular_file import MAX_TEXT_BYTES, read_regular


@final
@dataclass(frozen=True, slots=True)
class UnrunSources:
    """The source files that a reference leads to.

    Args:
        home: The file that declares the application.
        package: Its package; empty where its folder itself is on `sys.path`.
    """

    home: Path
    package: str

    @classmethod
    def of(cls, reference: str) -> "UnrunSources":
        """Find the declaring file of an application; no module is imported, not even its parents.

        Args:
            reference: See `find_application`.

        Raises:
            ApplicationError: There is no such file or module.
        """
        path, _ = reference_parts(reference)
        if names_file(path):
            file = Path(path).expanduser().resolve()
            if not is_source(file):
                raise ApplicationError(f"There is no file {file}; give the path of an app.py.")
            return cls(file, "")
        dotted = f"penstock.apps.{path}.app" if path in application_names() else path
        spec = _spec(dotted)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ApplicationError(
                f"There is no application {path!r}: no source file of that import path; use one of "
                f"{', '.join(application_names())}, an import path or a path to an app.py."
            )
        return cls(Path(spec.origin).resolve(), spec.parent or "")

    def read(self, further: Iterable[str]) -> "SourceContents":
        """Read the application's files; none is imported.

        Args:
            further: Paths, relative to the declaring file, of files that only the imported application names; they are
                read too where they exist.
        """
        folder = self.home.parent
        modules = frozenset({self.home, *local_modules(self.home, self.package, ()).values()})
        files = {_relative(file, folder): file for file in modules if file.is_relative_to(folder)}
        # Of its model, say, or a vocabulary.
        files |= {name: file for name in further if (file := (folder / name).resolve()).is_relative_to(folder)}
        contents = {file: _content(file) for file in {*modules, *files.values()}}
        return SourceContents(home=self.home, modules=modules, files=files, contents=contents)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContents:
    """The content of an application's source files, as it was read.

    Args:
        home: The file that declares the application.
        modules: That file, and the modules in its folder or below that it imports, directly or not.
        files: The files in its folder or below, by their paths relative to it.
        contents: Content of all of them; None for a file that is not there, or is no file of source text.
    """

    home: Path
    modules: frozenset[Path]
    files: Mapping[str, Path]
    contents: Mapping[Path, bytes | None] = field(repr=False)

    def changed(self, recorded: Mapping[str, str]) -> list[str]:
        """List the files that were changed, added or removed since their hashes were recorded.

        Args:
            recorded: SHA-256 by path relative to the declaring file.
        """
        hashes = self.hashes()
        return sorted(
            name
            for name in self.files.keys() | recorded.keys()
            if name not in hashes or hashes[name] != recorded.get(name)
        )

    def changed_code(self, recorded: Mapping[str, str], code: Mapping[str, str]) -> list[str]:
        """List the files of `changed` that differ in more than comments and line breaks.

        Args:
            recorded: See `changed`.
            code: SHA-256 of the syntax tree of each file, see `FoundApplication.code_sha256`.
        """
        texts = self._texts()
        return [
            name
            for name in self.changed(recorded)
            if name not in code or name not in texts or _sha256(code_of(texts[name])) != code[name]
        ]

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each file, by its path relative to the declaring file."""
        return {name: _sha256(text) for name, text in self._texts().items()}

    def declares(self) -> bool:
        """Tell whether penstock is imported by the declaring file, one beside it, or a module that these import."""
        imported = {name for file in self.modules for name in _imported(self.contents[file])}
        if any(map(_is_penstock, imported)):
            return True
        # The record may be one of a library.
        homes = (_home(name) for name in imported if name.partition(".")[0] not in sys.stdlib_module_names)
        return any(_is_penstock(name) for home in homes if home is not None for name in _imported(_content(home)))

    def _texts(self) -> dict[str, bytes]:
        return {name: text for name, file in self.files.items() if (text := self.contents[file]) is not None}


def _spec(dotted: str) -> ModuleSpec | None:
    """Find a module as `importlib.util.find_spec` does, which would import its parents."""
    if (loaded := sys.modules.get(dotted)) is not None:
        return loaded.__spec__
    spec, path = None, None
    parts = dotted.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        finders: list[Any] = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        try:
            spec = next((found for finder in finders if (found := finder.find_spec(name, path)) is not None), None)
        except KeyError:
            spec = _folder_spec(name, path or ())
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and count < len(parts):
            return None
    return spec


def _folder_spec(name: str, path: Iterable[str]) -> ModuleSpec:
    """Find a folder without `__init__.py` in folders of the same kind.

    Python's import system reads the path of its parent from `sys.modules`, where it is not, and raises a KeyError.
    """
    spec = ModuleSpec(name, None, is_package=True)
    folders = (Path(entry) / name.rpartition(".")[2] for entry in path)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _content(file: Path) -> bytes | None:
    """Read a file; None if it is not there, or is no file of source text."""
    pinned = pinned_source(file)
    if pinned is not None:
        return pinned
    try:
        return read_regular(file, MAX_TEXT_BYTES)
    except OSError:
        return None


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _imported(text: bytes | None) -> set[str]:
    """List the modules that a source text imports by absolute names."""
    statements = import_statements(text or b"")
    names = {name for each in statements if each.level == PLAIN for name in each.names}
    return names | {each.module for each in statements if each.module and not each.level}


def _is_penstock(name: str) -> bool:
    # An application within penstock imports its parts by relative names too.
    return name.partition(".")[0] == "penstock"


def _home(name: str) -> Path | None:
    try:
        spec = _spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if spec is None or not (spec.origin or "").endswith(".py") else Path(str(spec.origin))
