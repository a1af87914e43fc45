"""Compile the modules that have a .pxd file beside them; everything else of the build stands in pyproject.toml.

Their source stays Python, and runs as it is where Cython or a C compiler is missing (decision 082). Cython takes
neither `final` nor the slots of dataclasses, so that it gets copies without them.

PENSTOCK_COMPILE=0 leaves them out, and PENSTOCK_COMPILE=1 fails where they cannot be compiled.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
COPIES = "build/compiled"
DIRECTIVES = {"language_level": "3", "annotation_typing": False, "embedsignature": False}
CHOICE = os.environ.get("PENSTOCK_COMPILE", "")


def extensions() -> list[Extension]:
    """Return the modules to compile; none where that is not wanted, or Cython is missing."""
    if CHOICE == "0" or sys.platform != "linux":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        if CHOICE == "1":
            raise
        print("Cython is not installed: the modules of the server's request path are not compiled.", file=sys.stderr)
        return []
    os.chdir(ROOT)
    declared = sorted(Path("penstock").rglob("*.pxd"))
    made = [
        Extension(
            ".".join(path.with_suffix("").parts),
            [copy_of(path.with_suffix(".py"))],
            # A compiler that is missing must not keep anybody from installing.
            optional=CHOICE != "1",
            extra_compile_args=["-O2", "-g0"],
        )
        for path in declared
    ]
    for path in declared:
        write(Path(COPIES) / path, path.read_text())
    return cythonize(made, include_path=[COPIES], compiler_directives=DIRECTIVES, quiet=True)


def copy_of(source: Path) -> str:
    """Write a copy that Cython takes, with the digest of its source; return its path."""
    text = source.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    text = re.sub(r"^@final\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(@dataclass\(.*?)(?:, slots=True|slots=True(?:, )?)", r"\1", text, flags=re.MULTILINE)
    copy = Path(COPIES) / source
    write(copy, f'{text}\nCOMPILED_FROM = "{digest}"\n')
    for folder in [copy.parent, *copy.parent.parents][: len(source.parts) - 1]:
        write(folder / "__init__.py", "")
    return str(copy)


def write(path: Path, text: str) -> None:
    """Write a file, unless it holds the text already: Cython and the compiler go by times."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


setup(ext_modules=extensions(), options={"build_ext": {"parallel": str(os.cpu_count())}})
