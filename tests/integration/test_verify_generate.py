"""Answers that take steps in all places at once: training code, server, Python engine and web app."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.packs.pack import Pack
from penstock.device.pack_engine import PackEngine
from tests.support.generating_text import TEXTS, shared_speaker
from tests.support.page import url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    return shared_speaker(tmp_path_factory)


def test_every_place_gives_the_same(speaker: tuple[Pack, Path], tmp_path: Path) -> None:
    pack, bundle = speaker
    (tmp_path / "one.txt").write_text("the child and the cat")
    with RunningServer(bundle) as server:
        command = ["verify", str(bundle), str(tmp_path), "--pack", str(pack.folder), "--server", url_of(server)]
        said = CliRunner().invoke(build(), command, env={"COLUMNS": "160"})
        alone = CliRunner().invoke(build(), ["verify", str(bundle), "--server", url_of(server)])
    assert said.exit_code == 0, (said.output, said.exception)
    for place in ("server", "Python engine", "web app"):
        (row,) = (line for line in said.output.splitlines() if f" {place} " in line)
        assert f" {len(TEXTS) + 1} " in row
        assert " 0 " in row
    assert "(0 is allowed)" in said.output
    assert alone.exit_code == 0, (alone.output, alone.exception)


def test_a_browser_that_answers_otherwise_is_told(speaker: tuple[Pack, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pack, bundle = speaker
    answer = PackEngine.predict

    def other(self: PackEngine, inputs: Any) -> dict[str, np.ndarray]:
        found = answer(self, inputs)
        return {name: array ^ (np.arange(len(array)) == 2) for name, array in found.items()}

    monkeypatch.setattr(PackEngine, "predict", other)
    said = CliRunner().invoke(build(), ["verify", str(bundle), "--pack", str(pack.folder), "--no-browser"])
    assert said.exit_code == 1, said.output
