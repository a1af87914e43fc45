"""Run every example of the README and the documentation; tests/support/pages.py describes how."""

import re
import shutil
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.pages import EXAMPLES, PAGES, ROOT, Shell, commands, goes_on_from, matches, run_page
from tests.support.shared import made_once

INERT = {"text", "json", "toml", "yaml", "dockerfile", "javascript"}
# Each takes tens of seconds; other tests cover its features.
SLOW = {
    "docs/how-to/bring-weights.md",
    "docs/how-to/chain.md",
    "docs/how-to/coming-from.md",
    "docs/how-to/data.md",
    "docs/how-to/export.md",
    "docs/how-to/find-and-classify.md",
    "docs/how-to/fine-tune.md",
    "docs/how-to/gpu.md",
    "docs/how-to/initial-weights.md",
    "docs/how-to/live-chain.md",
    "docs/how-to/measure.md",
    "docs/how-to/prepare.md",
    "docs/how-to/proxies.md",
    "docs/how-to/refused.md",
    "docs/how-to/remote.md",
    "docs/how-to/run-in-production.md",
    "docs/how-to/sensor.md",
    "docs/how-to/several-tensors.md",
    "docs/how-to/sweep.md",
    "docs/how-to/text.md",
    "docs/how-to/train.md",
    "docs/how-to/train-on-several-gpus.md",
    "docs/tutorial/first-application.md",
    "docs/tutorial/first-hour.md",
    "docs/tutorial/live-keywords.md",
    "docs/tutorial/pictures.md",
    "docs/tutorial/speech.md",
}
# Pages whose commands take some seconds, and whose features other quick tests cover.
THOROUGH = {"docs/how-to/call-the-server.md", "docs/how-to/generate.md", "docs/how-to/speech-clients.md"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def parameter(page: Path) -> ParameterSet:
    name = name_of(page)
    # They start a dozen commands one after another.
    marks = [pytest.mark.timeout(360), *([pytest.mark.slow] if name in SLOW else [])]
    marks += [pytest.mark.thorough] if name in THOROUGH else []
    return pytest.param(page, id=name, marks=marks)


def begin(page: Path, factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Make the folder in which a page begins: empty, or as the page before it leaves it."""
    before = goes_on_from(page)
    if before is None:
        folder.mkdir()
        return folder

    def run(left: Path) -> None:
        run_page(before, Shell(begin(before, factory, left / "work"), left))

    left = made_once(factory, f"page-{before.stem}", run)
    return shutil.copytree(left / "work", folder)


@pytest.mark.parametrize("page", [parameter(page) for page in PAGES if EXAMPLES.parse(page).examples()])
def test_every_example_runs(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_page(page, Shell(begin(page, tmp_path_factory, tmp_path / "work"), tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_whether_it_is_run(page: Path) -> None:
    fences = re.findall(r"^[ \t]*```([^\n]*)$", page.read_text(), re.MULTILINE)
    languages = {fence.split()[0] if fence else "" for fence in fences[::2]}
    assert languages <= {"python", "console"} | INERT


def test_no_page_refers_to_a_run_that_no_page_makes() -> None:
    iris = (ROOT / "docs" / "tutorial" / "iris.md").read_text()
    for page in PAGES:
        text = page.read_text()
        if f"{ROOT}/docs/decisions" in str(page):
            continue
        used = set(re.findall(r"^\$ .*?(?<![\w/])(runs/[\w-]+)/bundle", text, re.MULTILINE))
        made = set(re.findall(r"(?:--out |to=f?\"|--resume )(runs/[\w{}-]+)", text))
        if goes_on_from(page) is not None:
            made |= set(re.findall(r"--out (runs/[\w-]+)", iris))
        unmade = {run for run in used - made if not any("{" in one for one in made)}
        assert not unmade, f"{name_of(page)} uses {unmade}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    """A further cell is not shown, and with it what it says."""
    text = re.sub(r"^[ \t]*```.*?^[ \t]*```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        plain = re.sub(r"`[^`\n]*`|\\\|", "", table).splitlines()
        cells = [row.rstrip().count("|") for row in plain]
        assert [row for row, count in zip(plain, cells, strict=True) if count != cells[0]] == []


def test_every_picture_is_there_and_named_by_a_page() -> None:
    texts = {page: page.read_text() for page in PAGES}
    shown = {
        (page.parent / place).resolve()
        for page, text in texts.items()
        for place in re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)", text)
    }
    assert [picture for picture in sorted(shown) if not picture.is_file()] == []
    pages = "\n".join([*texts.values(), (ROOT / "mkdocs.yml").read_text()])
    assert [file.name for file in (ROOT / "docs" / "assets").iterdir() if file.name not in pages] == []


def test_the_readme_has_the_example_of_the_pages() -> None:
    application = re.compile(r'```python title="app.py"\n(.*?)```', re.DOTALL)
    found = [application.search((ROOT / name).read_text()) for name in ("README.md", "docs/tutorial/iris.md")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][1] == found[1][1]


def test_a_wrong_output_is_seen() -> None:
    assert matches("a ... d\n", "a b c d\n")
    assert not matches("a\n", "b\n")
    assert list(commands("$ a \\\n  b\nx\ny\n$ c\n")) == [("a    b", "x\ny"), ("c", "")]
