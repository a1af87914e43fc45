"""Source files of applications as they were when a model was loaded, imported in place of those on disk.

A process that is started later imports what the others run, also where the files were edited or removed meanwhile.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import final


@final
class PinnedSources(importlib.abc.MetaPathFinder):
    """Content of source files by their place on disk; a finder of `sys.meta_path`."""

    def __init__(self) -> None:
        self._files: dict[Path, bytes] = {}

    def read(self, file: Path) -> bytes | None:
        """Return the pinned content of a file; None without one."""
        return self._files.get(file)

    def pin(self, files: Mapping[Path, bytes]) -> None:
        """Import these files as given from now on; modules of an earlier content are forgotten.

        Args:
            files: Content by resolved path.
        """
        if all(self._files.get(file) == content for file, content in files.items()):
            return
        for name, module in list(sys.modules.items()):
            loader = getattr(module, "__loader__", None)
            if isinstance(loader, _PinnedLoader) and files.get(loader.file, loader.source) != loader.source:
                del sys.modules[name]
        self._files |= files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module among the pinned files, in the folders where Python would look for it."""
        if not self._files:
            return None
        tail = fullname.rpartition(".")[2]
        for folder in sys.path if path is None else path:
            base = Path(folder or ".").resolve() / tail
            for file in (base / "__init__.py", base.with_name(f"{tail}.py")):
                source = self._files.get(file)
                if source is not None:
                    return importlib.util.spec_from_file_location(
                        fullname,
                        file,
                        loader=_PinnedLoader(fullname, file, source),
                        submodule_search_locations=[str(base)] if file.name == "__init__.py" else None,
                    )
            # What lies there unpinned comes before pinned files of later folders.
            if base.with_name(f"{tail}.py").is_file() or (base / "__init__.py").is_file():
                return None
        return None


@final
class _PinnedLoader(importlib.abc.InspectLoader):
    def __init__(self, name: str, file: Path, source: bytes) -> None:
        self._name, self.file, self.source = name, file, source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.file, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return self.file.name == "__init__.py"


def pin_sources(files: Mapping[Path, bytes]) -> None:
    """Import these files as given, in this process, from now on; see `PinnedSources.pin`."""
    finder = _finder()
    if finder is None:
        finder = PinnedSources()
        sys.meta_path.insert(0, finder)
    finder.pin(files)


def read_source(file: Path) -> bytes:
    """Read a source file: its pinned content, or else that on disk.

    Raises:
        OSError: It cannot be read.
    """
    pinned = pinned_source(file)
    return file.read_bytes() if pinned is None else pinned


def pinned_source(file: Path) -> bytes | None:
    """Return the pinned content of a source file; None without one."""
    finder = _finder()
    return None if finder is None else finder.read(file)


def is_source(file: Path) -> bool:
    """Check whether a file is pinned or on disk."""
    return pinned_source(file) is not None or file.is_file()


def _finder() -> PinnedSources | None:
    return next((each for each in sys.meta_path if isinstance(each, PinnedSources)), None)
