"""docs/how-to/refused.md against the errors of the server: every status and refusal, and no invented sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "refused.md").read_text()
HTTP = (ROOT / "docs" / "reference" / "http.md").read_text()
SENTENCES = re.findall(r"^\|(?: \d+ \|)? `([^`]+)` \|", PAGE, re.MULTILINE)
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RequestError)
}
SHEDDING = {"Overloaded", "TooLate", "DeadlineImpossible"}


def pattern_of(text: ast.expr) -> str | None:
    """A pattern of the sentences that an expression makes, as far as it is text."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return re.escape(text.value)
    if isinstance(text, ast.JoinedStr):
        parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in text.values]
        return "".join(parts)
    return None


def raised(folder: str) -> Iterator[tuple[str, str]]:
    """Class and pattern of each request error that a package makes."""
    for file in (ROOT / "penstock" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                pattern = pattern_of(node.args[0])
                if pattern is not None:
                    yield node.func.id, pattern


RAISED = [found for folder in ("serve", "core", "runtime") for found in raised(folder)]
WORDED = [(kind, pattern) for kind, pattern in RAISED if len(pattern.replace(".*", "")) > 12]


def test_every_status_is_explained() -> None:
    statuses = {str(kind.status) for kind in KINDS.values()}
    assert len(statuses) >= 12
    named = set(re.findall(r"^(?:## |\| )(\d{3})\b", PAGE, re.MULTILINE))
    assert statuses <= named
    assert statuses <= set(re.findall(r"^\| (\d{3}) \|", HTTP, re.MULTILINE))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_server_says_each_sentence(sentence: str) -> None:
    assert any(re.fullmatch(pattern, sentence) for _, pattern in WORDED)


# Those of values alone hand on another sentence.
@pytest.mark.parametrize(("kind", "pattern"), [found for found in WORDED if found[0] in SHEDDING])
def test_every_refusal_of_load_shedding_is_explained(kind: str, pattern: str) -> None:
    assert any(re.fullmatch(pattern, sentence) for sentence in SENTENCES), (kind, pattern)
