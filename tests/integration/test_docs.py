"""Run every example of the README and the documentation.

A document is run from top to bottom in a folder of its own, which holds the README's `app.py` and its run, `runs/iris`:

    ```python title="x.py"    becomes that file
    ```python                 is executed, with the port of the server that was started above it
    ```console                its `$ ` lines are run by bash and must print what follows them, where `...` stands for
                              anything; `penstock serve` stays up, on a free port that stands in for the one in the text
                              and with a latency budget that a busy machine keeps
    ```text, ```json, ...     are not examples to run
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from sysconfig import get_path

import pytest
from _pytest.mark.structures import ParameterSet
from sybil import Example, Sybil
from sybil.parsers.abstract.codeblock import AbstractCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.support.shared import made_once

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
INERT = {"text", "json", "toml", "yaml", "dockerfile", "javascript"}
ANNOUNCEMENT = re.compile(r"Serving .+ at (https?://127\.0\.0\.1:\d+)/")
URL_IN_TEXT = "http://127.0.0.1:8000"
TLS_URL_IN_TEXT = "https://127.0.0.1:8000"
# Each takes tens of seconds; other tests cover its features.
SLOW = {
    "docs/how-to/chain.md",
    "docs/how-to/measure.md",
    "docs/how-to/run-in-production.md",
    "docs/how-to/train-on-several-gpus.md",
    "docs/tutorial/first-application.md",
    "docs/tutorial/live-keywords.md",
    "docs/tutorial/pictures.md",
}
FENCE = re.compile(r"(?P<language>[a-z]*)(?: title=\"(?P<title>[\w./-]+)\")?[ \t]*\n")


class Shell:
    """The commands of a document, run in a folder; their servers are stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / ".server.log"
        self.servers: list[subprocess.Popen[bytes]] = []
        self.url = URL_IN_TEXT
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(commands_in(folder / ".bin")), get_path("scripts"), os.environ["PATH"]]),
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, command: str, expected: str) -> None:
        """Run one command and compare what it prints."""
        if command.startswith("make "):
            subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, check=True)
        elif command.startswith("penstock serve"):
            self.serve(command)
        else:
            command = command.replace(URL_IN_TEXT, self.url).replace(TLS_URL_IN_TEXT, self.url)
            # What is refused is so for its reason, and not because somebody else has the port.
            command = command.replace("penstock serve ", "penstock serve --port 0 ")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
            )
            refused = expected.startswith("penstock: ")
            assert (done.returncode != 0) == refused, f"$ {command}\n{done.stdout}\n{self.server_said()}"
            assert not expected or matches(expected, done.stdout), f"$ {command}\n{done.stdout}\ninstead of\n{expected}"

    def serve(self, command: str) -> None:
        """Start a server and wait until it prints its URL."""
        self.stop()
        command = re.sub(r" --(port|latency-ms) \d+", "", command)
        with self.log.open("w") as log:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port 0 --latency-ms 5000"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.servers.append(server)
        while not (found := ANNOUNCEMENT.search(self.log.read_text())):
            assert server.poll() is None, f"$ {command}\n{self.log.read_text()}\nstatus {server.returncode}"
            time.sleep(0.05)
        self.url = found[1]

    def server_said(self) -> str:
        """The last server's output, for the message of a failure."""
        return self.log.read_text() if self.log.exists() else ""

    def stop(self) -> None:
        """Stop the servers by SIGTERM, and assert that they end well."""
        for server in self.servers:
            server.terminate()
        codes = [server.wait(30) for server in self.servers]
        self.servers.clear()
        assert not any(codes), f"{codes}\n{self.server_said()}"


def commands_in(folder: Path) -> Path:
    """Make a folder with a command `penstock` of `sys.executable`, which may fork."""
    folder.mkdir(exist_ok=True)
    command = folder / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    return folder


def matches(expected: str, got: str) -> bool:
    """Compare an output with the text, in which `...` matches anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip(), got.strip(), flags)


def commands(source: str) -> Iterator[tuple[str, str]]:
    """Split a console block into its commands, each with its output."""
    for part in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        lines = part.replace("\\\n", " ").splitlines()
        yield lines[0], "\n".join(lines[1:])


def blocks(language: str, evaluate: Callable[[Example], None]) -> AbstractCodeBlockParser:
    lexer = RawFencedCodeBlockLexer(info_pattern=FENCE)
    return AbstractCodeBlockParser([lexer], language, evaluate, language_lexeme_name="language")


def evaluate_python(example: Example) -> None:
    source = str(example.parsed).replace(URL_IN_TEXT, example.namespace["shell"].url)
    if title := example.region.lexemes["title"]:
        file = Path.cwd() / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        return
    code = compile("\n" * (example.line + example.parsed.line_offset) + source, example.path, "exec")
    exec(code, example.namespace)


def evaluate_console(example: Example) -> None:
    found = list(commands(str(example.parsed)))
    assert found, f"line {example.line}: a console block without a command"
    for command, expected in found:
        example.namespace["shell"].run(command, expected)


EXAMPLES = Sybil([blocks("python", evaluate_python), blocks("console", evaluate_console)])


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def page(document: Path) -> ParameterSet:
    """A document as a parameter."""
    name = name_of(document)
    # They start a dozen commands one after another.
    slow = [pytest.mark.slow, pytest.mark.timeout(360)] if name in SLOW else []
    return pytest.param(document, id=name, marks=slow)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's application and its run."""

    def train(folder: Path) -> None:
        readme = (ROOT / "README.md").read_text()
        source = re.search(r'```python title="app.py"\n(.*?)```', readme, re.DOTALL)
        assert source, "the README shows no app.py"
        (folder / "app.py").write_text(source[1])
        Shell(folder).run("penstock train app.py --out runs/iris", "")

    return made_once(tmp_path_factory, "iris", train)


@pytest.fixture
def shell(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # As in a notebook of that folder.
    monkeypatch.syspath_prepend(tmp_path)
    shell = Shell(tmp_path)
    yield shell
    shell.stop()
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.mark.parametrize("document", [page(d) for d in DOCUMENTS if EXAMPLES.parse(d).examples()])
def test_every_example_runs(document: Path, shell: Shell) -> None:
    parsed = EXAMPLES.parse(document)
    parsed.namespace["shell"] = shell
    for example in parsed.examples():
        example.evaluate()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_says_whether_it_is_run(document: Path) -> None:
    fences = re.findall(r"^[ \t]*```([^\n]*)$", document.read_text(), re.MULTILINE)
    languages = {fence.split()[0] if fence else "" for fence in fences[::2]}
    assert languages <= {"python", "console"} | INERT


def test_a_wrong_output_is_seen() -> None:
    assert matches("a ... d\n", "a b c d\n")
    assert not matches("a\n", "b\n")
    assert list(commands("$ a \\\n  b\nx\ny\n$ c\n")) == [("a    b", "x\ny"), ("c", "")]
