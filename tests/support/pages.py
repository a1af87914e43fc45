"""Run the examples of a page of the documentation, as a newcomer would.

A page is run from top to bottom in an empty folder. A page that says `This page goes on from [TITLE](PATH)` begins in
the folder that the named page leaves, whose examples are run first.

    ```python title="x.py"    becomes that file
    ```python                 is executed, with the port of the server that was started above it
    ```console                its `$ ` lines are run by bash and must print what follows them, where `...` stands for
                              anything; `penstock serve` stays up, on a free port that stands in for the one in the text
    ```text, ```json, ...     are not examples to run

Options, budgets and time limits are those of the page. A request that is refused because the machine is busy is sent
again after a second, as the server's `Retry-After` asks.
"""

import doctest
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from sysconfig import get_path

from sybil import Example, Sybil
from sybil.parsers.abstract.codeblock import AbstractCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
GOES_ON = re.compile(r"^This page goes on from \[[^\]]+\]\(([\w./-]+\.md)\)", re.MULTILINE)
ANNOUNCEMENT = re.compile(r"Serving .+ at (https?://127\.0\.0\.1:\d+)/")
URL_IN_TEXT = "http://127.0.0.1:8000"
TLS_URL_IN_TEXT = "https://127.0.0.1:8000"
ADDRESS_IN_TEXT = '"127.0.0.1:8000"'
# Sentences of load shedding, whose requests have a Retry-After.
SHED = re.compile(r"past the budget of|^.*Deadline of .* exceeded|queued for decoding|slots are in use", re.MULTILINE)
ATTEMPTS = 10
# Lines that a slow machine adds, or one whose cache is empty.
PROGRESS = re.compile(r"^still exporting .*\n", re.MULTILINE)
FENCE = re.compile(r"(?P<language>[a-z]*)(?: title=\"(?P<title>[\w./-]+)\")?[ \t]*\n")


class Shell:
    """The commands of a page, run in a folder; their servers are stopped at the end.

    Args:
        folder: Where they run.
        beside: Another folder, for what the page must not see: the server's log, the command `penstock`.
        environment: Environment variables; those of a `penstock` of `sys.executable` by default.
    """

    def __init__(self, folder: Path, beside: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.log = beside / "server.log"
        self.servers: list[subprocess.Popen[bytes]] = []
        self.url = URL_IN_TEXT
        if environment is None:
            path = os.pathsep.join([str(commands_in(beside / "bin")), get_path("scripts"), os.environ["PATH"]])
            environment = os.environ | {"PATH": path}
        self.environment = environment | {"COLUMNS": "100", "NO_COLOR": "1"}

    def run(self, command: str, expected: str) -> None:
        """Run one command and compare what it prints."""
        if command.startswith("make "):
            subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, check=True)
        elif command.startswith("penstock serve"):
            self.serve(command)
        else:
            # What is refused is so for its reason, and not because somebody else has the port.
            command = self.with_address(command).replace("penstock serve ", "penstock serve --port 0 ")
            refused = expected.startswith("penstock: ")
            done = self._run(command)
            for _ in range(ATTEMPTS):
                if not SHED.search(done.stdout) or SHED.search(expected):
                    break
                time.sleep(1.0)
                done = self._run(command)
            assert (done.returncode != 0) == refused, f"$ {command}\n{done.stdout}\n{self.server_said()}"
            assert not expected or matches(expected, done.stdout), f"$ {command}\n{done.stdout}\ninstead of\n{expected}"

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )

    def serve(self, command: str) -> None:
        """Start a server and wait until it prints its URL."""
        self.stop()
        command = re.sub(r" --port \d+", "", command)
        with self.log.open("w") as log:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port 0"],
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

    def with_address(self, source: str) -> str:
        """Replace the address of the text by that of the server."""
        address = self.url.partition("//")[2]
        source = source.replace(URL_IN_TEXT, self.url).replace(TLS_URL_IN_TEXT, self.url)
        return source.replace(ADDRESS_IN_TEXT, f'"{address}"')

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
    """Compare an output with the text, in which `...` matches anything; lines of progress do not count."""
    got = PROGRESS.sub("", got)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip(), got.strip(), flags)


def commands(source: str) -> Iterator[tuple[str, str]]:
    """Split a console block into its commands, each with its output."""
    for part in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        lines = part.replace("\\\n", " ").splitlines()
        yield lines[0], "\n".join(lines[1:])


def goes_on_from(page: Path) -> Path | None:
    """The page whose examples are run before those of a page."""
    found = GOES_ON.search(page.read_text())
    return None if found is None else (page.parent / found[1]).resolve()


def _blocks(language: str, evaluate: Callable[[Example], None]) -> AbstractCodeBlockParser:
    lexer = RawFencedCodeBlockLexer(info_pattern=FENCE)
    return AbstractCodeBlockParser([lexer], language, evaluate, language_lexeme_name="language")


def _evaluate_python(example: Example) -> None:
    shell: Shell = example.namespace["shell"]
    source = shell.with_address(str(example.parsed))
    if title := example.region.lexemes["title"]:
        file = shell.folder / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        return
    code = compile("\n" * (example.line + example.parsed.line_offset) + source, example.path, "exec")
    exec(code, example.namespace)


def _evaluate_console(example: Example) -> None:
    found = list(commands(str(example.parsed)))
    assert found, f"line {example.line}: a console block without a command"
    for command, expected in found:
        example.namespace["shell"].run(command, expected)


EXAMPLES = Sybil([_blocks("python", _evaluate_python), _blocks("console", _evaluate_console)])


@contextmanager
def _in_folder(folder: Path) -> Generator[None]:
    """Work in a folder, as a notebook in it does."""
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def run_page(page: Path, shell: Shell) -> None:
    """Run the examples of a page from top to bottom, and stop its servers.

    Raises:
        AssertionError: A command failed, or printed something else.
    """
    with _in_folder(shell.folder):
        parsed = EXAMPLES.parse(page)
        parsed.namespace["shell"] = shell
        try:
            for example in parsed.examples():
                example.evaluate()
        except BaseException:
            for server in shell.servers:
                server.kill()
                server.wait()
            raise
        shell.stop()
