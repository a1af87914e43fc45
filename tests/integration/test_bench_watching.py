"""The figures of `penstock watch` are measured, and only where nothing was lost."""

from pathlib import Path

import pytest

from benchmarks.acceptance.device import watching
from penstock.core.errors import BenchError
from tests.support.packs import colour_pack


def test_the_age_of_answers_is_measured_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = colour_pack(tmp_path / "pack").folder
    monkeypatch.setattr(watching, "FRAMES", 10)
    monkeypatch.setattr(watching, "WATCHED", 1)
    (over,) = watching.video_age_p95(pack)
    assert over > -watching.MODEL_FACTOR * watching.RATE
    film = watching.write_video(tmp_path / "film.mp4")
    monkeypatch.setattr(watching, "FRAMES", 11)
    with pytest.raises(BenchError, match="of 11 frames it reports"):
        watching._watched(pack, film)


def test_the_engine_is_measured_beside_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ROUNDS", 3)
    monkeypatch.setattr(watching, "RUNS", 2)
    ratios = watching.engine_overhead(colour_pack(tmp_path / "pack").folder)
    assert len(ratios) == 3
    assert all(ratio > 0 for ratio in ratios)
