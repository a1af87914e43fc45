"""The import statements of a source text."""

import ast
from functools import lru_cache
from typing import NamedTuple

# Texts up to this size are parsed once: a load of a model looks at the same sources several times.
CACHED_BYTES, CACHED_TEXTS = 64 << 10, 256
# Level of `import a, b`.
PLAIN = -1


class ImportStatement(NamedTuple):
    """One import statement.

    Args:
        module: What follows `from`, without the dots; empty in `import a, b` and `from . import a`.
        level: How many dots `from` has; `PLAIN` in `import a, b`.
        names: What follows `import`.
    """

    module: str
    level: int
    names: tuple[str, ...]


def import_statements(source: bytes) -> tuple[ImportStatement, ...]:
    """List the import statements of a source text, in functions and conditions too; none if it cannot be parsed."""
    return _cached(source) if len(source) <= CACHED_BYTES else _parsed(source)


def _parsed(source: bytes) -> tuple[ImportStatement, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    statements: list[ImportStatement] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            statements.append(ImportStatement("", PLAIN, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            statements.append(ImportStatement(node.module or "", node.level, names))
    return tuple(statements)


_cached = lru_cache(maxsize=CACHED_TEXTS)(_parsed)
