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
# None in the place of an object of a C type is an AttributeError, as in Python.
DIRECTIVES = {"language_level": "3", "annotation_typing": False, "embedsignature": False, "nonecheck": True}
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
    declared = [path.relative_to(ROOT) for path in sorted((ROOT / "penstock").rglob("*.pxd"))]
    for path in declared:
        copy(path)
    made = [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path.with_suffix(".py"))],
            # A compiler that is missing must not keep anybody from installing.
            optional=CHOICE != "1",
            extra_compile_args=["-O2", "-g0"],
        )
        for path in declared
    ]
    # There, so that tracebacks name the modules as they are installed.
    os.chdir(ROOT / COPIES)
    made = cythonize(made, compiler_directives=DIRECTIVES, quiet=True)
    os.chdir(ROOT)
    for module in made:
        module.sources = [f"{COPIES}/{source}" for source in module.sources]
    return made


def copy(declaration: Path) -> None:
    """Write a copy of a module that Cython takes, with the digest of its source and as many lines."""
    source = declaration.with_suffix(".py")
    text = (ROOT / source).read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    text = re.sub(r"^@final$", "# final", text, flags=re.MULTILINE)
    text = re.sub(r"^(@dataclass\(.*?)(?:, slots=True|slots=True(?:, )?)", r"\1", text, flags=re.MULTILINE)
    # The directives, so that it is compiled again when they change.
    write(source, f'{text}\nCOMPILED_FROM = "{digest}"  # {DIRECTIVES}\n')
    write(declaration, (ROOT / declaration).read_text())
    for folder in [*declaration.parents][:-1]:
        write(folder / "__init__.py", "")


def write(path: Path, text: str) -> None:
    """Write a file below the copies, unless it holds the text already: Cython and the compiler go by times."""
    copied = ROOT / COPIES / path
    if not copied.exists() or copied.read_text() != text:
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(text)


setup(ext_modules=extensions(), options={"build_ext": {"parallel": str(os.cpu_count())}})
