"""Compile the modules that have a .pxd file beside them, and those in C; the rest of the build is in pyproject.toml.

The source of the former stays Python, and runs as it is where Cython or a C compiler is missing (decision 082). Cython
takes neither `final` nor the slots of dataclasses, so that it gets copies without them.

PENSTOCK_COMPILE=0 leaves them out, and PENSTOCK_COMPILE=1 fails where they cannot be compiled.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
COPIES = "build/compiled"
# None in the place of an object of a C type is an AttributeError, as in Python.
DIRECTIVES = {"language_level": "3", "annotation_typing": False, "embedsignature": False, "nonecheck": True}
CHOICE = os.environ.get("PENSTOCK_COMPILE", "")


class AllOrNothing(build_ext):
    """Compiles all modules, or leaves all of them to the interpreter: those that use one another must fit."""

    def run(self) -> None:
        """Compile them."""
        try:
            super().run()
        except Exception as error:
            if CHOICE == "1":
                raise
            print(f"The modules of the server's request path are not compiled: {error}", file=sys.stderr)
            for module in self.extensions:
                Path(self.get_ext_fullpath(module.name)).unlink(missing_ok=True)
            self.extensions = []


def extensions() -> list[Extension]:
    """Return the modules to compile; none where that is not wanted, or Cython is missing."""
    if CHOICE == "0" or (sys.platform != "linux" and CHOICE != "1"):
        return []
    try:
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError
    except ImportError:
        if CHOICE == "1":
            raise
        print("Cython is not installed: the modules of the server's request path are not compiled.", file=sys.stderr)
        return []
    declared = [path.relative_to(ROOT) for path in sorted((ROOT / "penstock").rglob("*.pxd"))]
    for old in [*(ROOT / COPIES).rglob("*.pxd")]:
        if old.relative_to(ROOT / COPIES) not in declared:
            old.unlink()
    for path in declared:
        copy(path)
    made = [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path.with_suffix(".py"))],
            extra_compile_args=["-O2", "-g0"],
        )
        for path in declared
    ]
    # Tracebacks name the modules as Cython finds them: relative to the copies, as they are installed.
    os.chdir(ROOT / COPIES)
    try:
        made = cythonize(made, compiler_directives=DIRECTIVES, quiet=True)
    except CompileError:
        if CHOICE == "1":
            raise
        print("Cython refuses the modules of the server's request path: they are not compiled.", file=sys.stderr)
        return []
    finally:
        os.chdir(ROOT)
    for module in made:
        module.sources = [f"{COPIES}/{source}" for source in module.sources]
    return [*made, *(in_c(path.relative_to(ROOT)) for path in sorted((ROOT / "penstock").rglob("*.c")))]


def in_c(source: Path) -> Extension:
    """Return the module of a C file, which has its digest.

    At -O3 every compiler makes vectors of loops. No product and sum become one operation, which rounds otherwise.
    """
    digest = hashlib.sha256((ROOT / source).read_bytes()).hexdigest()
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        define_macros=[("COMPILED_FROM", f'"{digest}"')],
        extra_compile_args=["-O3", "-ffp-contract=off", "-g0"],
    )


def copy(declaration: Path) -> None:
    """Write a copy of a module that Cython takes, with the digest of its source and as many lines."""
    source = declaration.with_suffix(".py")
    contents = [(ROOT / path).read_bytes() for path in (source, declaration)]
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    text = contents[0].decode()
    text = re.sub(r"^@final$", "# final", text, flags=re.MULTILINE)
    text = re.sub(r"^(@dataclass\(.*?)(?:, slots=True|slots=True(?:, )?)", r"\1", text, flags=re.MULTILINE)
    # The directives, so that it is compiled again when they change.
    write(source, f'{text}\nCOMPILED_FROM = "{digest}"  # {DIRECTIVES}\n')
    write(declaration, contents[1].decode())
    for folder in [*declaration.parents][:-1]:
        write(folder / "__init__.py", "")


def write(path: Path, text: str) -> None:
    """Write a file below the copies, unless it holds the text already: Cython and the compiler compare times."""
    copied = ROOT / COPIES / path
    if not copied.exists() or copied.read_bytes() != text.encode():
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(text.encode())


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": AllOrNothing},
    options={"build_ext": {"parallel": str(os.cpu_count())}},
)
