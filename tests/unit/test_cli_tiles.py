"""`penstock tiles` with a pack, as it is typed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.apps.mitosis.slide_file import write_slide
from penstock.cli import main
from penstock.core.errors import BundleError
from penstock.device.dense_run import DenseRun
from penstock.runtime.execution import Execution
from tests.support.dense import dense_pack, spotted
from tests.support.packs import colour_pack


@pytest.fixture(name="folder")
def folder_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    dense_pack(tmp_path / "pack")
    Image.fromarray(spotted(70, 90, (30, 20), (50, 61))).save(tmp_path / "slide.png")
    return tmp_path


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    monkeypatch.setattr(sys, "argv", ["penstock", "tiles", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.usefixtures("folder")
def test_the_finds_of_a_slide_are_printed_or_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = typed(monkeypatch, capsys, "pack", "slide.png")
    assert status == 0
    found = json.loads(out)
    assert (found["slide"], found["width"], found["height"]) == ("slide.png", 90, 70)
    assert sorted((round(one["x"]), round(one["y"]), one["label"]) for one in found["finds"]) == [
        (30, 20, "dark"),
        (50, 61, "dark"),
    ]
    assert err.startswith("Finds: 2  Tiles: 48, ")
    written = typed(
        monkeypatch, capsys, "pack", "slide.png", "--out", "finds.json", "--overview", "finds.png", "--threads", "3"
    )
    assert written[:2] == (0, "")
    assert json.loads(Path("finds.json").read_text()) == found
    with Image.open("finds.png") as picture:
        assert picture.size == (90, 70)
        assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) == 3, "white, black and the circles"
    darkest = json.loads(typed(monkeypatch, capsys, "pack", "slide.png", "--threshold", "1")[1])["finds"]
    assert [one["score"] for one in darkest] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("pack", "slide.png", "--out", "slide.png"), "slide.png is the slide itself; name another file."),
        (("pack", "missing.png", "--out", "slide.png"), "missing.png is not a file"),
        (
            ("pack", "slide.png", "--overview", "no/finds.png"),
            "the finds cannot be written (no/finds.png has no folder)",
        ),
        (("pack", "slide.png", "--out", "pack"), "the finds cannot be written (pack is a folder)"),
        (
            ("pack", "slide.png", "--overview", "finds.txt"),
            "the finds cannot be written (unknown file extension: .txt)",
        ),
        (("colours", "slide.png"), "the network of 'colours' is not dense; give its application a `dense`"),
        (("nothing", "slide.png"), "nothing is no pack, bundle or URL"),
        (("pack", "missing.tif"), "missing.tif is not a file"),
        (("pack", "pack/pack.json"), "pack.json is no picture, or is truncated"),
        (("http://127.0.0.1:9", "slide.png"), "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    words: tuple[str, ...],
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    colour_pack(folder / "colours")
    monkeypatch.setattr("penstock.cli.tile_sources.RETRIES", 0)
    status, _, err = typed(monkeypatch, capsys, *words)
    assert status == 2
    assert err.startswith("penstock: ")
    assert sentence in err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", [("--out", "no/finds.json"), ("--overview", "finds.txt"), ("--overview", "finds")])
def test_files_that_cannot_be_written_are_found_before_the_run(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[object] = []
    over = DenseRun.over
    monkeypatch.setattr(DenseRun, "over", lambda *given: (runs.append(given), over(*given))[1])
    status, _, err = typed(monkeypatch, capsys, "pack", "slide.png", *words)
    assert (status, runs) == (2, [])
    assert "the finds cannot be written" in err
    assert typed(monkeypatch, capsys, "pack", "slide.png")[0] == 0
    assert len(runs) == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", [(), ("--accept-changed-app",)])
def test_a_changed_application_is_accepted_when_asked(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def make_runnable(folder: Path, how: Execution, rows: object) -> None:
        asked.append(how.accept_changed)
        raise BundleError("no network here.")

    monkeypatch.setattr("penstock.runtime.executor_choice.make_runnable", make_runnable)
    Path("bundle").mkdir()
    Path("bundle/manifest.json").touch()
    status, _, err = typed(monkeypatch, capsys, "bundle", "slide.png", "--device", "cpu", *words)
    assert (status, asked) == (2, [bool(words)])
    assert "no network here" in err


@pytest.mark.usefixtures("folder")
def test_a_slide_of_another_scale_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from tests.support import dense

    monkeypatch.setattr(dense, "DENSE", replace(dense.DENSE, pixel_um=0.5))
    dense_pack(Path("coarse"))
    write_slide("slide.tif", spotted(70, 90, (30, 20)))
    status, _, err = typed(monkeypatch, capsys, "coarse", "slide.tif", "--out", "finds.json")
    assert status == 0
    assert "slide.tif has 0.25 um a pixel, but the network expects 0.5: the finds may be wrong." in err
    assert "um a pixel" not in typed(monkeypatch, capsys, "pack", "slide.tif", "--out", "finds.json")[2]
