"""Sources and bundles as they were when a model was loaded, whatever became of the files."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import BundleCorrupt, ServeError
from penstock.core.source_files.find_application import find_application
from penstock.core.source_files.pinned_sources import PinnedSources, pin_sources
from penstock.serve.pinned_content import PREFIX, PinnedModels, pinned_bundle, pinned_models, pinned_reference
from tests.support.small import APP_PY, examples, network, write_app

HELPED = APP_PY.replace("from torch import nn", "from pinned_helper import WORDS\nfrom torch import nn").replace(
    '"Four numbers in, three out."', "WORDS"
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before, path = list(sys.meta_path), list(sys.path)
    yield
    sys.meta_path[:], sys.path[:] = before, path
    sys.modules.pop("pinned_helper", None)


def helped(folder: Path, words: str) -> Path:
    file = write_app(folder, HELPED)
    (folder / "pinned_helper.py").write_text(f"WORDS = {words!r}\n")
    return file


def bundled(file: Path) -> Path:
    from penstock import Bundle

    Bundle.write(find_application(str(file)), network(), examples(), to=file.parent / "bundle")
    return file.parent / "bundle"


def test_edited_and_removed_files_are_imported_as_pinned(tmp_path: Path) -> None:
    file = helped(tmp_path, "first")
    helper = tmp_path / "pinned_helper.py"
    pin_sources({each: each.read_bytes() for each in (file, helper)})
    helper.write_text("WORDS = 'edited'\n")
    found = find_application(str(file))
    assert found.application.description == "first"
    hashes = found.source_sha256()
    helper.unlink()
    file.unlink()
    del sys.modules["pinned_helper"]
    del sys.modules[found.module.__name__]
    again = find_application(str(file))
    assert (again.application.description, again.source_sha256()) == ("first", hashes)


def test_other_content_replaces_modules_of_the_content_before(tmp_path: Path) -> None:
    file = helped(tmp_path, "first")
    helper = tmp_path / "pinned_helper.py"
    pin_sources({file: file.read_bytes(), helper: helper.read_bytes()})
    assert find_application(str(file)).application.description == "first"
    pin_sources({file: file.read_bytes() + b"\n", helper: b"WORDS = 'second'\n"})
    assert find_application(str(file)).application.description == "second"


def test_one_finder_serves_all_pins(tmp_path: Path) -> None:
    pin_sources({tmp_path / "one.py": b""})
    pin_sources({tmp_path / "two.py": b""})
    assert sum(isinstance(each, PinnedSources) for each in sys.meta_path) == 1


def test_a_pin_has_the_bundle_and_the_sources(tmp_path: Path) -> None:
    bundle = bundled(helped(tmp_path / "app", "first"))
    (tmp_path / "pins").mkdir()
    pins = PinnedModels(tmp_path / "pins", None)
    folder = str(pins.pin(bundle))
    for each in bundle.iterdir():
        assert (pinned_bundle(folder, str(bundle)) / each.name).read_bytes() == each.read_bytes()
        each.unlink()
    (tmp_path / "app" / "app.py").unlink()
    (tmp_path / "app" / "pinned_helper.py").unlink()
    reference = pinned_reference(folder)
    assert reference == f"{tmp_path / 'app' / 'app.py'}:app"
    assert set(find_application(reference).source_sha256()) == {"app.py", "pinned_helper.py"}
    pins.release(Path(folder))
    assert list((tmp_path / "pins").iterdir()) == []
    # An engine may still be about to read them.
    with pytest.raises(ServeError, match="the load was given up"):
        pinned_reference(folder)


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    bundle = bundled(write_app(tmp_path / "app"))
    (bundle / "golden.safetensors").unlink()
    os.mkfifo(bundle / "golden.safetensors")
    with pytest.raises(
        BundleCorrupt, match=r"golden\.safetensors cannot be read \(it is no regular file\); copy the bundle again"
    ):
        PinnedModels(tmp_path, None).pin(bundle)
    assert not (tmp_path / "0").exists()


def test_copies_of_killed_servers_are_removed_and_those_of_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    with pinned_models(None):
        assert not left.exists()
        with pinned_models(None):
            assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []
