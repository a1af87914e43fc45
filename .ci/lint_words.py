"""Find abolished identifiers, abolished phrases and docstrings that begin with a question word.

The lists are the files of `.ci/old_words`: a line is `identifier NAME`, which must not occur as a Python identifier, or
`phrase TEXT`, which must not occur in any text file, in any case. `docs/glossary.md` has the terms that replaced them.
Run from the root of the repository: `python .ci/lint_words.py [FILE...]`; without files, over all that git tracks.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LISTS = Path(".ci/old_words")
# History and the lists themselves quote old words; vendored and generated files are not ours.
EXEMPT = re.compile(
    r"CHANGELOG\.md|docs/decisions/|\.ci/old_words/|/vendor/|_pb2\.pyi?$|benchmarks/results/|tests/data/"
)
TEXT = {".py", ".md", ".toml", ".js", ".html", ".css", ".yml", ".yaml", ".txt", ".sh", ".proto"}
NAMED = {"Makefile", "Dockerfile"}
# A docstring is an imperative or a noun phrase.
QUESTION = re.compile(r"(What|How|Whether|Which|Why|Where|When|Who|Whom|Whose|Whoever|Whatever|For how|Of)\b")
DOCUMENTED = ("penstock/", "benchmarks/acceptance/")


def read_lists() -> tuple[set[str], re.Pattern[str] | None]:
    """The abolished identifiers, and one pattern of all abolished phrases."""
    identifiers: set[str] = set()
    phrases: list[str] = []
    for file in sorted(LISTS.glob("*.txt")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            kind, _, text = line.partition(" ")
            if not line or line.startswith("#"):
                continue
            if kind == "identifier" and text.isidentifier():
                identifiers.add(text)
            elif kind == "phrase" and text.strip():
                phrases.append(text.strip())
            else:
                sys.exit(f"{file}:{number}: {line!r} is neither 'identifier NAME' nor 'phrase TEXT'.")
    pattern = "|".join(rf"(?<!\w){re.escape(phrase)}(?!\w)" for phrase in sorted(phrases, key=len, reverse=True))
    return identifiers, re.compile(pattern, re.IGNORECASE) if phrases else None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each docstring with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def findings(file: str, identifiers: set[str], phrases: re.Pattern[str] | None) -> Iterator[str]:
    """One sentence for each finding in a file."""
    text = Path(file).read_text(encoding="utf-8")
    if phrases is not None:
        for number, line in enumerate(text.splitlines(), 1):
            for match in phrases.finditer(line):
                yield f"{file}:{number}: {match[0]!r} has a plain term, see docs/glossary.md"
    if not file.endswith(".py"):
        return
    # Few files hold one as a word of their text, and to find tokens is slow.
    if not identifiers.isdisjoint(re.findall(r"\w+", text)):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in identifiers:
                yield f"{file}:{token.start[0]}: identifier {token.string!r} has another name now, see docs/glossary.md"
    if file.startswith(DOCUMENTED):
        for number, docstring in docstrings(ast.parse(text)):
            if QUESTION.match(docstring):
                yield f"{file}:{number}: the docstring begins with a question word: {docstring.splitlines()[0][:60]!r}"


def is_text(file: Path) -> bool:
    """Whether a file is one that people write."""
    return (file.suffix in TEXT or file.name in NAMED) and file.is_file()


def main() -> None:
    """Print each finding and their count; exit with status 1 if there is one."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    files = [file for file in sys.argv[1:] or tracked if is_text(Path(file))]
    identifiers, phrases = read_lists()
    found = [line for file in files if not EXEMPT.search(file) for line in findings(file, identifiers, phrases)]
    print(*found, f"{len(found)} findings", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
