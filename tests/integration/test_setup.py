"""What `make` does before anything else, and the one sentence that it gives where it cannot."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import eventually

ROOT = Path(__file__).parents[2]
SET_UP_FILES = ("bootstrap.py", "Makefile", "pyproject.toml", "constraints.txt")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in SET_UP_FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def bootstrap(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "bootstrap.py", *arguments],
        cwd=clone,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def finished_before(clone: Path, python: str) -> None:
    """A .venv that was finished for older constraints, whose python is a shell script, and logs how it is called."""
    script = clone / ".venv" / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\necho "$@" >> {clone}/calls\n{python}\n')
    script.chmod(0o755)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stamp = {"inputs": "older", "root": str(clone.resolve()), "python": version}
    (clone / ".venv" / "penstock-setup.json").write_text(json.dumps(stamp))


def processor_s() -> float:
    """Of the commands that have ended."""
    return os.times().children_user + os.times().children_system


def calls(clone: Path) -> list[str]:
    return (clone / "calls").read_text().splitlines()


def the_sentence(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("penstock: ")
    return lines[0]


def test_a_second_run_changes_nothing_and_is_quick(clone: Path) -> None:
    finished_before(clone, "exit 0")
    assert bootstrap(clone).returncode == 0
    assert [call.split()[-1] for call in calls(clone)] == ["setuptools", f"{clone}[dev]"]

    before_s = processor_s()
    again = bootstrap(clone)
    assert processor_s() - before_s < 1
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(calls(clone)) == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(clone: Path, name: str) -> None:
    finished_before(clone, "exit 0")
    bootstrap(clone)
    with (clone / name).open("a") as file:
        file.write("\n# changed\n")
    assert bootstrap(clone).returncode == 0
    assert len(calls(clone)) == 4


def test_everything_installed_is_constrained(clone: Path) -> None:
    finished_before(clone, "exit 0")
    bootstrap(clone)
    assert all(f"--constraint {clone}/constraints.txt" in call for call in calls(clone))


def test_torch_is_pinned_once_and_without_a_local_part() -> None:
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in pinned if line.startswith("torch==")] == ["torch==2.13.0"]
    assert all(line.count("==") == 1 and "+" not in line for line in pinned)


def test_an_interrupted_set_up_is_redone(clone: Path) -> None:
    finished_before(clone, "sleep 60")
    # What a shell starts in the background ignores Ctrl-C, and so does what that starts: the tests, too.
    process = subprocess.Popen(
        [sys.executable, "bootstrap.py"],
        cwd=clone,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    eventually((clone / "calls").exists, within_s=60)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "interrupted" in error
    assert not (clone / ".venv" / "penstock-setup.json").exists()

    again = bootstrap(clone, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    assert "Removing the unfinished or foreign .venv" in again.stdout


def test_two_at_once_wait_for_each_other(clone: Path) -> None:
    finished_before(clone, "sleep 1")
    first = subprocess.Popen([sys.executable, "bootstrap.py"], cwd=clone)
    eventually((clone / "calls").exists, within_s=60)
    second = bootstrap(clone)
    assert first.wait(60) == 0
    assert second.returncode == 0
    assert "Waiting for another set-up" in second.stdout
    assert len(calls(clone)) == 2


def test_an_old_python_can_read_the_file() -> None:
    ast.parse((ROOT / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_an_old_python_is_refused(clone: Path) -> None:
    pretence = (
        "import runpy, sys; sys.version_info = (3, 8, 18); sys.version = '3.8.18 (default)'; "
        "runpy.run_path('bootstrap.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", pretence], cwd=clone, capture_output=True, text=True, timeout=30)
    sentence = the_sentence(done)
    assert "Python 3.8.18 is too old, Penstock needs 3.11 or newer" in sentence
    assert "PYTHON=" in sentence
    assert not (clone / ".venv").exists()


def test_a_python_without_venv_is_refused(clone: Path) -> None:
    pretence = (
        "import importlib.util, runpy; found = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name: None if name == 'ensurepip' else found(name); "
        "runpy.run_path('bootstrap.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", pretence], cwd=clone, capture_output=True, text=True, timeout=30)
    assert "apt-get install python3-venv" in the_sentence(done)


def test_no_python_at_all(clone: Path) -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=clone, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "penstock: There is no 'no-such-python' here: install Python 3.11 or newer" in done.stderr


def test_no_network(clone: Path) -> None:
    dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_FIND_LINKS": ""}
    done = bootstrap(clone, PIP_CONFIG_FILE=os.devnull, PIP_EXTRA_INDEX_URL="", **dead)
    assert "The package index cannot be reached: check the network" in the_sentence(done)
    assert not (clone / ".venv" / "penstock-setup.json").exists()


def test_no_package_index_allowed(clone: Path) -> None:
    done = bootstrap(clone, PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "pip found no" in the_sentence(done)


@pytest.mark.parametrize(
    "words",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_a_full_disk(clone: Path, words: str) -> None:
    finished_before(clone, f'echo "{words}" >&2; exit 1')
    assert "The disk is full" in the_sentence(bootstrap(clone))
    assert not (clone / ".venv" / "penstock-setup.json").exists()


def test_an_unknown_failure_shows_its_last_words(clone: Path) -> None:
    finished_before(clone, "echo the moon is in the wrong house; exit 3")
    done = bootstrap(clone)
    assert done.returncode == 1
    assert "the moon is in the wrong house" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("penstock: `")


def test_another_python_makes_the_environment_anew(clone: Path) -> None:
    finished_before(clone, "exit 0")
    stamp = clone / ".venv" / "penstock-setup.json"
    stamp.write_text(stamp.read_text().replace('"python": "3.', '"python": "4.'))
    kept = bootstrap(clone)
    assert "Making" not in kept.stdout
    (clone / "constraints.txt").write_text("# none\n")
    finished = json.loads(stamp.read_text()) | {"python": "4.0"}
    stamp.write_text(json.dumps(finished))
    chosen = bootstrap(clone, "--chosen", PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "Making a virtual environment" in chosen.stdout


@pytest.mark.parametrize(("apt", "words"), [("exit 0", ""), ("echo Could not resolve a host; exit 100", "reached")])
def test_chromium_is_installed_where_it_is_missing(clone: Path, tmp_path: Path, apt: str, words: str) -> None:
    binaries = tmp_path / "binaries"
    binaries.mkdir()
    (binaries / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {clone}/calls\n{apt}\n')
    (binaries / "apt-get").chmod(0o755)
    done = bootstrap(clone, "browser", PATH=str(binaries))
    if os.geteuid() != 0:
        assert "sudo apt-get install chromium" in the_sentence(done)
    elif words:
        assert words in the_sentence(done)
    else:
        assert done.returncode == 0
        assert calls(clone)[1].startswith("install --yes --no-install-recommends chromium")


def test_continuous_integration_runs_exactly_make_test(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$PWD: make $@"\n')
    make.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        cwd="/",
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{ROOT}: make test\n"


def test_the_container_takes_the_steps_of_the_makefile() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r'\bmake (\w+)|"make", "(\w+)"', re.sub(r"^#.*$", "", dockerfile, flags=re.MULTILINE))
    assert {first or second for first, second in targets} == {"setup", "demo"}
    for first, second in targets:
        subprocess.run(["make", "-n", first or second], cwd=ROOT, capture_output=True, check=True)
