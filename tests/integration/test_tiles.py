"""`penstock tiles` with a pack, a bundle and a server: the same finds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.apps.mitosis.slide_file import write_slide
from penstock.cli.tile_sources import dense_run
from penstock.core.errors import ApplicationError
from tests.support.dense import dense_pack, spotted, write_dense
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough


def tiles(folder: Path, source: str, *options: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m", "penstock", "tiles", source, str(folder / "slide.tif"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["finds"] if done.returncode == 0 else [], done


SPOTS = [(30, 20), (150, 61), (201, 180), (90, 222)]


def test_a_pack_and_a_server_find_the_same(tmp_path: Path) -> None:
    write_slide(tmp_path / "slide.tif", spotted(230, 260, *SPOTS))
    dense_pack(tmp_path / "pack")
    expected, done = tiles(tmp_path, str(tmp_path / "pack"))
    assert done.returncode == 0, done.stderr
    assert len(expected) == 4
    with RunningServer(write_dense(tmp_path)) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert tiles(tmp_path, url)[0] == expected
        with (
            pytest.raises(ApplicationError, match=r"serves no dense application 'digits'; it has darkness; name one"),
            found(url),
        ):
            pass


def found(url: str) -> Any:
    return dense_run(url, app="digits", device="cpu", precision="fp32", threads=None, cores=1, cache=Path())


@pytest.mark.slow
def test_a_bundle_finds_the_same_as_a_pack(tmp_path: Path) -> None:
    write_slide(tmp_path / "slide.tif", spotted(230, 260, *SPOTS))
    dense_pack(tmp_path / "pack")
    options = ("--device", "cpu", "--cache", str(tmp_path / "cache"))
    assert tiles(tmp_path, str(write_dense(tmp_path)), *options)[0] == tiles(tmp_path, str(tmp_path / "pack"))[0]


@pytest.mark.slow
def test_mitosis_is_trained_exported_and_run_on_a_slide(tmp_path: Path) -> None:
    """A few steps: the whole way from generated slides to the finds, whatever they are."""
    from penstock.apps.mitosis.style import FIRST
    from penstock.apps.mitosis.tissue import make_slide

    (tmp_path / "app.py").write_text(
        """
from dataclasses import replace
from penstock.apps.mitosis.app import app as mitosis


def recipe():
    from penstock.apps.mitosis.recipe import mitosis_recipe
    from penstock.apps.mitosis.style import FIRST
    from penstock.apps.mitosis.tiles import SlideTiles, generated_slides
    from penstock.train.recipe import Data

    def data():
        slides = generated_slides(2, 600, FIRST, first_seed=1)
        return Data(train=SlideTiles(slides, 4), validation=SlideTiles(slides[:1]), test=SlideTiles(slides[1:]))

    return mitosis_recipe(data, steps=3, batch_size=2)


app = replace(mitosis, name="small", recipe=recipe)
"""
    )
    for words in (
        ("train", "app.py", "--out", "run"),
        ("export", "run/bundle", "--out", "pack"),
    ):
        subprocess.run([sys.executable, "-m", "penstock", *words], cwd=tmp_path, check=True, capture_output=True)
    assert set(json.loads((tmp_path / "run" / "report.json").read_text())) == {
        "threshold",
        "validation_f1",
        "test_f1",
        "test_figures",
    }
    write_slide(tmp_path / "slide.tif", make_slide(1, 600, 900, FIRST).pixels)
    _, done = tiles(tmp_path, str(tmp_path / "pack"), "--threshold", "0.9")
    assert done.returncode == 0, done.stderr
