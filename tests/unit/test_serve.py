"""What `serve` says before it starts anything."""

from pathlib import Path

import pytest

from penstock.core.errors import BundleError
from penstock.serve import server
from penstock.serve.settings import ModelSettings, Settings
from tests.support.serving import write_doubler


def test_a_bundle_that_is_not_there_is_named_before_another_one_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(server, "_serve", lambda settings, reserved: started.append(settings))
    good, missing = write_doubler(tmp_path), tmp_path / "missing"
    with pytest.raises(BundleError, match=f"there is no folder {missing}; 'penstock train' writes a bundle"):
        server.serve(Settings(models=ModelSettings(bundles=(good, missing))))
    assert started == []
    server.serve(Settings(models=ModelSettings(bundles=(good,))))
    assert len(started) == 1
