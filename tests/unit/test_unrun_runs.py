"""Sources that changed since a run or a sweep began: refused before they run, by each command that goes on with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.source_files.find_application import find_application
from penstock.train.sweep.sweeping import SWEEP_FILE
from tests.support.thorough import thorough

APP = """
import parts
from penstock import Application, TensorSpec

app = Application(
    name="some",
    input=TensorSpec(dtype="float32", shape=(2,), meaning="numbers"),
    output=TensorSpec(dtype="float32", shape=(1,), meaning="a number"),
    model="parts:Net",
)
"""
PARTS = "Net = None\n"
# Says that it ran.
PAYLOAD = "from pathlib import Path\nPath({!r}).write_text('ran')\n"
COMMANDS = {
    "resume": ("train", "--resume", "run"),
    "bundle": ("bundle", "run", "--out", "b"),
    "sweep": ("sweep", "app.py", "--out", "swept", "--trials", "2", "--device", "cpu", "--set", "seed=[1, 2]"),
}


@pytest.fixture(name="folder")
def folder_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An application, a run of it that was interrupted, and a sweep."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "parts.py").write_text(PARTS)
    sys.modules.pop("parts", None)
    found = find_application(str(tmp_path / "app.py"))
    assert set(found.source_sha256()) == {"app.py", "parts.py"}
    fields = {
        "application": found.reference,
        "name": "some",
        "state": "running",
        "sources": found.source_sha256(),
        "code": found.code_sha256(),
        "overrides": {},
        "threads": 1,
        "checkpoints": [],
    }
    for folder, file in (("run", "run.json"), ("swept", SWEEP_FILE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps(fields))
    return tmp_path


def said(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "file"),
    [
        *(thorough(each, "parts.py") if each == "sweep" else (each, "parts.py") for each in COMMANDS),
        ("resume", "app.py"),
    ],
)
def test_changed_sources_are_refused_before_they_run(folder: Path, command: str, file: str) -> None:
    ran = folder / "ran"
    source = folder / file
    source.write_text(PAYLOAD.format(str(ran)) + source.read_text())
    assert f"{file} of 'some' changed since" in said(folder, *COMMANDS[command])
    assert not ran.exists()
    # The payload runs where it is accepted.
    if file == "app.py":
        said(folder, *COMMANDS[command], "--accept-changed-app")
        assert ran.exists()


def test_a_comment_is_no_change(folder: Path) -> None:
    (folder / "parts.py").write_text("# More.\n" + PARTS)
    assert "changed since" not in said(folder, *COMMANDS["resume"])
