"""The application of a bundle: its sources are compared before any of them runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from penstock.core.bundles.bundle import MANIFEST, Manifest, read_bundle, read_manifest, write_bundle
from penstock.core.bundles.bundle_application import bundle_application, compare_sources
from penstock.core.errors import ApplicationError, SourcesChanged
from penstock.core.source_files import unrun_sources
from penstock.core.source_files.find_application import find_application
from penstock.core.source_files.unrun_sources import UnrunSources
from penstock.runtime.bundle_writer import Bundle
from tests.support.small import APP_PY, examples, network, write_app

# Says that it ran.
PAYLOAD = "from pathlib import Path\nPath({!r}).write_text('ran')\n"


def made(folder: Path) -> Path:
    """Write an application with a module beside it, and its bundle."""
    write_app(folder, "import parts\n" + APP_PY)
    (folder / "parts.py").write_text("FACTOR = 2\n")
    sys.modules.pop("parts", None)
    found = find_application(str(folder / "app.py"))
    module = found.model()
    module.load_state_dict(network().state_dict())
    return Bundle.write(found, module, examples(), to=folder / "bundle").folder


def renamed(folder: Path, **fields: Any) -> Path:
    """Write a bundle's manifest again with other fields, and right hashes."""
    files = read_bundle(folder)
    manifest: Manifest = replace(files.manifest, **fields)
    write_bundle(folder, manifest, files.weights.read_bytes(), files.golden)
    return folder


@pytest.fixture(name="ran")
def ran_(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture(name="folder")
def folder_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return made(tmp_path / "run")


def test_unchanged_sources_are_imported(folder: Path) -> None:
    files = read_bundle(folder)
    assert set(files.manifest.sources) == {"app.py", "parts.py"}
    assert compare_sources(folder, files.manifest).changed == []
    assert bundle_application(files).application.name == "small"


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["app.py", "parts.py"])
def test_changed_sources_are_refused_before_they_run(folder: Path, ran: Path, file: str) -> None:
    source = folder.parent / file
    source.write_text(source.read_text() + PAYLOAD.format(str(ran)))
    sys.modules.pop("parts", None)
    with pytest.raises(SourcesChanged, match=f"{file} of application 'small' changed since the bundle was made"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()
    # In another process, which has imported nothing yet.
    code = f"from penstock import load; load({str(folder)!r}, accept_changed=True)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert ran.exists()


def test_an_added_module_is_refused_before_it_runs(folder: Path, ran: Path) -> None:
    source = folder.parent / "parts.py"
    source.write_text("import added\n")
    (folder.parent / "added.py").write_text(PAYLOAD.format(str(ran)))
    sys.modules.pop("parts", None)
    assert compare_sources(folder, read_manifest(folder)).changed == ["added.py", "parts.py"]
    with pytest.raises(SourcesChanged, match=r"added.py, parts.py"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()


def test_a_named_application_is_compared_before_it_runs(folder: Path, ran: Path) -> None:
    moved = folder.parent / "moved.py"
    moved.write_text(PAYLOAD.format(str(ran)))
    with pytest.raises(SourcesChanged, match=r"moved\.py of"):
        bundle_application(read_bundle(folder), str(moved))
    assert not ran.exists()


def payload_in(folder: Path, ran: Path) -> dict[str, str]:
    (folder / "payload.py").write_text("import penstock\n" + PAYLOAD.format(str(ran)))
    return {"payload.py": sha256((folder / "payload.py").read_bytes()).hexdigest()}


@pytest.mark.parametrize("attribute", ["", ":net"])
def test_a_file_of_the_bundle_is_no_application(folder: Path, ran: Path, attribute: str) -> None:
    renamed(folder, reference=f"{folder}/payload.py{attribute}", sources=payload_in(folder.parent, ran))
    payload_in(folder, ran)
    with pytest.raises(ApplicationError, match="names a file of its own"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()


def test_a_link_of_the_bundle_is_no_application(folder: Path, ran: Path) -> None:
    sources = payload_in(folder.parent, ran)
    renamed(folder, reference=f"{folder}/link.py", sources=sources)
    (folder / "link.py").symlink_to(folder.parent / "payload.py")
    with pytest.raises(ApplicationError, match="names a file of its own"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()


def test_an_import_path_into_the_bundle_is_no_application(folder: Path, ran: Path) -> None:
    sys.path.insert(0, str(folder.parent))
    renamed(folder, reference="bundle.payload", sources=payload_in(folder.parent, ran))
    payload_in(folder, ran)
    with pytest.raises(ApplicationError, match="names a file of its own"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()
    assert "bundle" not in sys.modules


def test_parents_of_an_import_path_do_not_run(folder: Path, ran: Path) -> None:
    sys.path.insert(0, str(folder.parent))
    package = folder.parent / "outer"
    package.mkdir()
    (package / "__init__.py").write_text(PAYLOAD.format(str(ran)))
    for reference in ("outer.nothing", "outer.nothing:app", "outer"):
        renamed(folder, reference=reference)
        with pytest.raises(ApplicationError, match=r"There is no application|declares none"):
            bundle_application(read_bundle(folder))
    assert not ran.exists()


def test_folders_without_init_are_parents_too(tmp_path: Path, ran: Path) -> None:
    # Of such a folder within another, Python's finder looks for the imported parent.
    inner = tmp_path / "plain_outer" / "plain_inner"
    inner.mkdir(parents=True)
    (inner / "declared.py").write_text(PAYLOAD.format(str(ran)) + APP_PY)
    sys.path.insert(0, str(tmp_path))
    try:
        found = UnrunSources.of("plain_outer.plain_inner.declared:app")
        assert (found.home, found.package) == (inner / "declared.py", "plain_outer.plain_inner")
        for reference in ("plain_outer.plain_inner.nothing", "plain_outer.nothing.declared", "plain_outer.plain_inner"):
            with pytest.raises(ApplicationError, match="There is no application"):
                UnrunSources.of(reference)
    finally:
        sys.path.remove(str(tmp_path))
    assert not ran.exists()
    assert not {name for name in sys.modules if name.startswith("plain_outer")}


def test_a_program_that_declares_nothing_is_no_application(folder: Path, ran: Path) -> None:
    program = folder.parent / "program.py"
    program.write_text(PAYLOAD.format(str(ran)))
    renamed(folder, reference=str(program), sources={"program.py": sha256(program.read_bytes()).hexdigest()})
    with pytest.raises(ApplicationError, match="declares none"):
        bundle_application(read_bundle(folder))
    # Nor does one of the standard library, whose hash everybody knows.
    renamed(folder, reference="this", sources={})
    with pytest.raises(ApplicationError, match="declares none"):
        bundle_application(read_bundle(folder))
    assert not ran.exists()


def test_an_added_module_that_is_too_large_to_compare_is_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "app.py").write_text("import parts\nimport shadowed\n")
    recorded = UnrunSources.of(str(folder.parent / "app.py")).read(()).hashes()
    (folder.parent / "shadowed.py").write_text("#" * 2000)
    monkeypatch.setattr(unrun_sources, "MAX_TEXT_BYTES", 1999)
    assert UnrunSources.of(str(folder.parent / "app.py")).read(recorded).changed(recorded) == ["shadowed.py"]


def test_recorded_paths_out_of_the_folder_are_not_read(folder: Path) -> None:
    os.mkfifo(folder.parent.parent / "pipe")
    os.mkfifo(folder.parent / "pipe")
    sources = read_bundle(folder).manifest.sources | {"../pipe": "0", "pipe": "0", "/dev/zero": "0"}
    renamed(folder, sources=sources)
    assert compare_sources(folder, read_manifest(folder)).changed == ["../pipe", "/dev/zero", "pipe"]


def test_inspect_imports_nothing(folder: Path, ran: Path) -> None:
    write_app(folder.parent, APP_PY + PAYLOAD.format(str(ran)))
    found = {"app.py": sha256((folder.parent / "app.py").read_bytes()).hexdigest()}
    renamed(folder, sources=found)
    command = [sys.executable, "-m", "penstock", "inspect", str(folder), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["application"]["changed"] == []
    assert not ran.exists()
    subprocess.run([*command, "--run"], check=True, capture_output=True, timeout=60)
    assert ran.exists()


@pytest.mark.parametrize("name", [MANIFEST, "weights.safetensors", "golden.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "endless", "sparse"])
def test_only_regular_files_of_plausible_size_are_read(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 42)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else "/proc/kmsg")
    # In another process: a test must not wait for ever.
    code = f"from penstock.core.bundles.bundle import read_bundle; read_bundle({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert "BundleCorrupt" in done.stderr or "is not a bundle" in done.stderr, done.stderr
