"""A load compares the sources of an application once, and what was compared is what is loaded."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.bundles import bundle_application
from penstock.core.bundles.bundle import read_manifest
from penstock.core.bundles.bundle_application import ComparedSources, compare_sources
from penstock.core.errors import SourcesChanged
from penstock.core.source_files import unrun_sources
from penstock.core.source_files.app_sources import local_modules
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from penstock.serve import pinned_content
from penstock.serve.control import bundle_trials
from penstock.serve.control.bundle_trials import BundleTrials
from penstock.serve.messages import LoadModel
from penstock.serve.pinned_content import SOURCES, SOURCES_JSON, PinnedModels
from penstock.serve.repository.bundle_preparation import BundlePreparation
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.settings import ExecutionSettings, ModelSettings, Settings
from tests.support.small import APP_PY, examples, network, write_app
from tests.unit.test_repository import Sides, run

EDITED = "# edited\n" + APP_PY


@pytest.fixture(name="app")
def app_(tmp_path: Path) -> Path:
    """An application, whose bundle is the model `small`."""
    return write_app(tmp_path / "app")


@pytest.fixture(name="bundle")
def bundle_(tmp_path: Path, app: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "pins").mkdir()
    return written(app, tmp_path / "models" / "small")


def written(app: Path, bundle: Path) -> Path:
    return Bundle.write(find_application(str(app)), network(), examples(), to=bundle).folder


class Server:
    """A repository whose trials pass without a process, and the sources that its engine would import."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        on_demand: bool = False,
        accept_changed: bool = False,
    ) -> None:
        self.tried = 0
        self.while_tried: Callable[[], object] = lambda: None
        self.loaded: list[str] = []
        settings = Settings(
            models=ModelSettings(directory=folder / "models", on_demand=on_demand, accept_changed_app=accept_changed),
            execution=ExecutionSettings(cache=folder / "cache", device="cpu"),
        )
        monkeypatch.setattr(BundleTrials, "_run", self._run)
        self.sides = Sides()
        self.sides.while_loading = self._load
        self.repository = ModelRepository(
            settings.models,
            self.sides,
            pins=PinnedModels(folder / "pins", None),
            preparation=BundlePreparation(BundleTrials(settings).check),
        )

    async def _run(self, *given: Any) -> tuple[int, bytes]:
        self.tried += 1
        await asyncio.sleep(0)
        self.while_tried()
        return 0, b'""'

    def _load(self, command: LoadModel, engine: int) -> None:
        (name,) = json.loads((Path(command.pinned) / SOURCES_JSON).read_text())["files"].values()
        self.loaded.append((Path(command.pinned) / SOURCES / name).read_text())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the calls that compare sources, and those that list modules."""
    calls: list[str] = []

    def compare(folder: Path, *given: Any) -> ComparedSources:
        calls.append("compare")
        return compare_sources(folder, *given)

    def modules(*given: Any) -> dict[str, Path]:
        calls.append("list")
        return local_modules(*given)

    for module in (bundle_application, bundle_trials, pinned_content):
        monkeypatch.setattr(module, "compare_sources", compare)
    monkeypatch.setattr(unrun_sources, "local_modules", modules)
    return calls


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("on_demand", [False, True])
def test_a_load_compares_the_sources_and_lists_the_modules_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_demand: bool
) -> None:
    server = Server(tmp_path, monkeypatch, on_demand=on_demand)
    calls = counted(monkeypatch)

    async def scene() -> None:
        await server.repository.load_all()
        assert calls == ([] if on_demand else ["compare", "list"])
        calls.clear()
        await server.repository.load("small")
        assert calls == ["compare", "list"]

    run(scene)
    assert server.tried == 1
    assert server.loaded == [APP_PY] * (1 if on_demand else 2)


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_sources_that_are_edited_after_they_were_compared_are_not_loaded(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool, removed: bool
) -> None:
    server = Server(tmp_path, monkeypatch)
    server.while_tried = app.unlink if removed else partial(app.write_text, EDITED)
    run(server.repository.load_all if at_start else partial(server.repository.load, "small"))
    assert server.loaded == [APP_PY]


def test_a_bundle_that_was_replaced_while_it_was_tried_is_compared_and_tried_again(
    app: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch)

    def replace() -> None:
        server.while_tried = lambda: None
        app.write_text(EDITED)
        written(app, bundle)

    server.while_tried = replace
    run(partial(server.repository.load, "small"))
    assert (server.tried, server.loaded) == (2, [EDITED])


def test_a_pin_of_another_bundle_than_the_compared_one_compares_again(app: Path, bundle: Path, tmp_path: Path) -> None:
    before = compare_sources(bundle, read_manifest(bundle))
    app.write_text(EDITED)
    written(app, bundle)
    folder = PinnedModels(tmp_path / "pins", None).pin(bundle, before)
    assert (folder / SOURCES / "0").read_text() == EDITED


@pytest.mark.usefixtures("bundle")
def test_accepted_sources_are_looked_at_again_by_the_load(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hash of the bundle says what they are: those that are loaded are to be those that were tried."""
    server = Server(tmp_path, monkeypatch, accept_changed=True)

    def edit() -> None:
        server.while_tried = lambda: None
        app.write_text(EDITED)

    server.while_tried = edit
    run(partial(server.repository.load, "small"))
    assert (server.tried, server.loaded) == (2, [EDITED])


@pytest.mark.usefixtures("bundle")
def test_accepted_sources_that_are_edited_in_their_trial_are_not_loaded_before_they_were_tried(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial may have imported either content, and an engine would refuse none."""
    server = Server(tmp_path, monkeypatch, accept_changed=True)
    server.while_tried = partial(app.write_text, EDITED)
    with pytest.raises(SourcesChanged, match="'small' changed in its trial; load it again"):
        run(server.repository.load_all)
    assert server.loaded == []
    # What passed under the name of the recorded sources may have been the edited ones.
    app.write_text(APP_PY)
    server.while_tried = lambda: None
    run(server.repository.load_all)
    assert (server.tried, server.loaded) == (2, [APP_PY])


@pytest.mark.usefixtures("bundle")
def test_changed_sources_that_are_put_back_before_their_load_are_loaded(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.write_text(EDITED)
    server = Server(tmp_path, monkeypatch)
    prepare = BundlePreparation.prepare

    async def prepared(*given: Any) -> ComparedSources | None:
        compared = await prepare(*given)
        assert compared is not None
        assert compared.changed == ["app.py"]
        app.write_text(APP_PY)
        return compared

    monkeypatch.setattr(BundlePreparation, "prepare", prepared)
    run(partial(server.repository.load, "small"))
    assert server.loaded == [APP_PY]


def test_an_application_of_penstock_is_pinned_by_the_hashes_that_were_compared(tmp_path: Path) -> None:
    found = find_application("digits")
    raw = found.application.input
    made = Bundle.write(found, found.model(), np.zeros((2, *raw.shape), raw.numpy_dtype), to=tmp_path / "bundle")
    compared = compare_sources(made.folder, read_manifest(made.folder))
    about = json.loads((PinnedModels(tmp_path, None).pin(made.folder, compared) / SOURCES_JSON).read_text())
    assert about == {"reference": "", "files": {}, "installed": "digits", "hashes": found.source_sha256()}
