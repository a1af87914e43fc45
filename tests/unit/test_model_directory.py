"""What a model directory says of folders that are no models."""

from pathlib import Path

import pytest

from penstock.core.errors import ServeError, StorageError, UnknownRoute
from penstock.serve.repository.model_directory import ModelDirectory, model_directory
from penstock.serve.settings import ModelSettings


@pytest.fixture(params=["folder", "URL"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> ModelDirectory:
    for file in ("pack/pack.json", "run/run.json", "run/bundle/manifest.json", "other/notes.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    place = tmp_path if request.param == "folder" else Path(f"file://{tmp_path}")
    found = model_directory(ModelSettings(directory=place, cache=tmp_path / "cache"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pack", "'pack' of the model directory is a pack, which 'penstock export' wrote for devices and browsers; a"),
        ("pack", "a server takes the bundle that it was exported from, such as RUN/bundle."),
        ("run", "'run' of the model directory is a run; put its folder 'bundle' there instead."),
        ("other", "'other' of the model directory is no bundle and has no numbered versions."),
    ],
)
def test_what_lies_there_instead_of_a_bundle_is_named(models: ModelDirectory, name: str, sentence: str) -> None:
    with pytest.raises(UnknownRoute) as refused:
        models.find_versions(name)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("manifest.json", "is itself a bundle; serve it with 'penstock serve "),
        ("pack.json", "is itself a pack, which 'penstock export' wrote for devices and browsers; a server takes"),
    ],
)
def test_a_bundle_or_a_pack_is_no_directory_of_models(tmp_path: Path, file: str, sentence: str) -> None:
    (tmp_path / file).touch()
    found = model_directory(ModelSettings(directory=tmp_path))
    assert found is not None
    with pytest.raises(ServeError, match=f"--models {tmp_path} {sentence}"):
        found.names()
    absent = model_directory(ModelSettings(directory=tmp_path / "nowhere"))
    assert absent is not None
    with pytest.raises(ServeError, match="nowhere is no directory; name the folder that holds"):
        absent.names()


def test_a_directory_that_is_gone_is_not_a_model_that_is_not_there(tmp_path: Path) -> None:
    found = model_directory(ModelSettings(directory=tmp_path / "drive"))
    assert found is not None
    with pytest.raises(StorageError, match=r"the model directory .*/drive is not there; mount or restore it"):
        found.find_versions("iris")
