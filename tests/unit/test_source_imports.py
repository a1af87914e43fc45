"""Import statements of a source text."""

import ast
from unittest.mock import patch

import pytest

from penstock.core.source_files.source_imports import CACHED_BYTES, PLAIN, ImportStatement, import_statements


def test_statements_anywhere_in_a_text_are_listed() -> None:
    text = b"import a.b, c as d\nfrom . import e\nfrom ..f.g import h as i, j\ndef k():\n    from l import *\n"
    assert import_statements(text) == (
        ImportStatement("", PLAIN, ("a.b", "c")),
        ImportStatement("", 1, ("e",)),
        ImportStatement("f.g", 2, ("h", "j")),
        ImportStatement("l", 0, ("*",)),
    )


@pytest.mark.parametrize("text", [b"import (", b"import a\0", b"(" * 5000, b"a = " + b"-" * 100_000 + b"1", b"\xff"])
def test_a_text_that_cannot_be_parsed_imports_nothing(text: bytes) -> None:
    assert import_statements(text) == ()


@pytest.mark.parametrize(("size", "times"), [(0, 1), (CACHED_BYTES, 3)])
def test_a_text_is_parsed_once_unless_it_is_large(size: int, times: int) -> None:
    text = b"import what_no_other_test_imports\n" + size * b"#"
    with patch.object(ast, "parse", wraps=ast.parse) as parse:
        assert len({import_statements(text) for _ in range(3)}) == 1
    assert parse.call_count == times
