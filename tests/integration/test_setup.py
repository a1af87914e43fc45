"""The set-up that precedes every make target, and the sentence on its failures."""

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest

from tests.support.processes import eventually

ROOT = Path(__file__).parents[2]
# It makes virtual environments: not what `sys.executable` is while tests run.
PYTHON = Path(get_path("scripts")) / "python"
SET_UP_FILES = (
    "bootstrap.py",
    "Makefile",
    "pyproject.toml",
    "requirements.lock",
    "setup.py",
    "torch.lock",
    "torch-cpu.lock",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in SET_UP_FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def bootstrap(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "bootstrap.py", *arguments],
        cwd=clone,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def finished_before(clone: Path, python: str) -> None:
    """Make a .venv of an older lock, whose python is a shell script that logs its arguments."""
    script = clone / ".venv" / "bin" / "python"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\necho "$@" >> {clone}/calls\n{python}\n')
    script.chmod(0o755)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stamp = {"inputs": "older", "root": str(clone.resolve()), "python": version}
    (clone / ".venv" / "penstock-setup.json").write_text(json.dumps(stamp))


def processor_s() -> float:
    """Processor time of all commands that have ended."""
    return os.times().children_user + os.times().children_system


def calls(clone: Path) -> list[str]:
    return (clone / "calls").read_text().splitlines()


def the_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The last line on stderr, below the output of pip."""
    *_, line = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("penstock: ")
    assert "Traceback" not in done.stderr
    return line


def test_a_second_run_changes_nothing_and_is_quick(clone: Path) -> None:
    finished_before(clone, "exit 0")
    assert bootstrap(clone).returncode == 0
    commands = [call.split() for call in calls(clone)]
    assert [command[2:3] for command in commands] == [["install"]] * 4 + [["check"], ["build_ext"]]
    lasts = [f"{clone}/requirements.lock", f"{clone}/torch-cpu.lock", "torch==2.13.0", str(clone)]
    assert [command[-1] for command in commands[:4]] == lasts

    before_s = processor_s()
    again = bootstrap(clone)
    assert processor_s() - before_s < 1
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(calls(clone)) == 6


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock", "torch.lock", "torch-cpu.lock"])
def test_changed_requirements_are_installed(clone: Path, name: str) -> None:
    finished_before(clone, "exit 0")
    bootstrap(clone)
    with (clone / name).open("a") as file:
        file.write("\n# changed\n")
    assert bootstrap(clone).returncode == 0
    assert len(calls(clone)) == 12


def test_changed_modules_are_compiled_alone(clone: Path) -> None:
    finished_before(clone, "exit 0")
    module = clone / "penstock" / "serve" / "quick.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    module.with_suffix(".pxd").write_text("")
    said = bootstrap(clone).stdout
    # The Python of this test compiles nothing.
    assert "It is not compiled, so that requests take more time; .venv/compiled.log says why." in said
    module.write_text("# changed\n")
    assert bootstrap(clone).stdout.startswith("Compiling")
    assert [call.split()[-2] for call in calls(clone)[6:]] == ["build_ext"]


def test_a_module_that_cannot_be_compiled_is_an_error_with_its_log(clone: Path) -> None:
    finished_before(clone, 'case "$*" in *build_ext*) echo not Python; exit 1;; esac')
    assert ".venv/compiled.log has what it said" in the_sentence(bootstrap(clone))
    assert (clone / ".venv" / "compiled.log").read_text() == "not Python\n"


def test_only_what_is_hashed_is_installed_and_nothing_is_resolved(clone: Path) -> None:
    finished_before(clone, "exit 0")
    bootstrap(clone)
    locked, torch, _, own, _, _ = calls(clone)
    assert "--require-hashes --no-deps" in locked
    assert "--require-hashes --no-deps" in torch
    assert "--no-deps --no-build-isolation" in own


def test_a_build_of_torch_without_a_known_hash_is_refused_unless_it_is_taken_unchecked(clone: Path) -> None:
    finished_before(
        clone, 'case "$*" in */torch-cpu.lock) echo THESE PACKAGES DO NOT MATCH THE HASHES >&2; exit 1;; esac'
    )
    refused = bootstrap(clone)
    assert "THESE PACKAGES" in refused.stderr
    assert "torch.lock and torch-cpu.lock do not know the build" in the_sentence(refused)
    assert "make setup TORCH=unchecked" in the_sentence(refused)
    assert not (clone / ".venv" / "penstock-setup.json").exists()
    assert not any("torch.lock" in call for call in calls(clone))
    finished_before(clone, 'case "$*" in */torch.lock | */torch-cpu.lock) exit 1;; esac')
    done = bootstrap(clone, "--unchecked-torch")
    assert done.returncode == 0
    assert "Installing torch without a hash" in done.stdout
    said = subprocess.check_output(["make", "-n", "setup", "TORCH=unchecked"], cwd=clone, text=True)
    assert "--unchecked-torch" in said


def test_the_build_on_pypi_is_taken_by_its_hash_where_the_index_has_no_cpu_build(clone: Path) -> None:
    none = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    finished_before(clone, f'case "$*" in */torch-cpu.lock) echo "{none}" >&2; exit 1;; esac')
    done = bootstrap(clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--require-hashes --no-deps" in calls(clone)[2]
    assert calls(clone)[2].endswith("/torch.lock")


def test_torch_is_locked_for_every_build_that_a_set_up_takes() -> None:
    for name, build, least in (("torch.lock", "", 20), ("torch-cpu.lock", "+cpu", 2)):
        lock = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
        (pinned,) = [line for line in lock if not line.startswith("#")]
        version = pinned.split()[0]
        assert version.endswith(build)
        assert f'TORCH = "{version.removesuffix(build)}"' in (ROOT / "bootstrap.py").read_text()
        hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", pinned))
        assert len(hashes) >= least
    images = (ROOT / "deploy" / "images" / "torch-cpu.txt").read_text()
    assert hashes == set(re.findall(r"--hash=sha256:([0-9a-f]{64})", images))


def test_every_requirement_has_a_version_and_hashes_but_torch() -> None:
    lock = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    pinned = [line for line in lock if not line.lstrip().startswith("#")]
    assert len(pinned) > 100
    assert all(re.match(r"[a-z0-9-]+==[\w.]+ ", line) and "--hash=sha256:" in line for line in pinned)
    assert not [line for line in pinned if line.startswith(("torch==", "nvidia-", "triton=="))]


def test_what_the_lock_knows_of_torch_is_so() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (torch,) = declared["tool"]["uv"]["dependency-metadata"]
    assert f'TORCH = "torch=={torch["version"]}"' in (ROOT / "bootstrap.py").read_text()
    # What is said of torch for the lock is what the installed one asks for, but for the CUDA libraries.
    asked = [line for line in requires("torch") or [] if "extra ==" not in line and "platform_system" not in line]
    assert sorted(torch["requires-dist"]) == sorted(asked)


@pytest.mark.thorough
def test_an_interrupted_set_up_is_redone(clone: Path) -> None:
    # An interrupt between the start and the wait for it leaves it behind: it must not hold the pipe of the messages.
    finished_before(clone, "exec sleep 60 > /dev/null 2>&1")
    # What a shell starts in the background ignores Ctrl-C, and so does what that starts: the tests, too.
    process = subprocess.Popen(
        [PYTHON, "bootstrap.py"],
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


@pytest.mark.thorough
def test_two_at_once_wait_for_each_other(clone: Path) -> None:
    finished_before(clone, "sleep 1")
    first = subprocess.Popen([PYTHON, "bootstrap.py"], cwd=clone)
    eventually((clone / "calls").exists, within_s=60)
    second = bootstrap(clone)
    assert first.wait(60) == 0
    assert second.returncode == 0
    assert "Waiting for another set-up" in second.stdout
    assert len(calls(clone)) == 6


def test_an_old_python_can_read_the_file() -> None:
    ast.parse((ROOT / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_an_old_python_is_refused(clone: Path) -> None:
    pretence = (
        "import runpy, sys; sys.version_info = (3, 8, 18); sys.version = '3.8.18 (default)'; "
        "runpy.run_path('bootstrap.py', run_name='__main__')"
    )
    done = subprocess.run([PYTHON, "-c", pretence], cwd=clone, capture_output=True, text=True, timeout=30)
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
    done = subprocess.run([PYTHON, "-c", pretence], cwd=clone, capture_output=True, text=True, timeout=30)
    assert "apt-get install python3-venv" in the_sentence(done)


def test_no_python_at_all(clone: Path) -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=clone, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "penstock: There is no 'no-such-python' here: install Python 3.11 or newer" in done.stderr


@pytest.mark.thorough
def test_no_network(clone: Path) -> None:
    dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_FIND_LINKS": ""}
    done = bootstrap(clone, PIP_CONFIG_FILE=os.devnull, PIP_EXTRA_INDEX_URL="", **dead)
    assert "check the network, the disk and pip's settings (pip config list)" in the_sentence(done)
    assert "connection" in done.stderr.lower()
    assert not (clone / ".venv" / "penstock-setup.json").exists()


@pytest.mark.slow
def test_no_package_index_allowed(clone: Path) -> None:
    done = bootstrap(clone, PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "pip's settings" in the_sentence(done)
    assert "No matching distribution found" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "the moon is in the wrong house",
    ],
)
def test_a_failure_is_shown_with_its_last_words(clone: Path, words: str) -> None:
    finished_before(clone, f'echo "{words}" >&2; exit 3')
    done = bootstrap(clone)
    assert the_sentence(done).startswith("penstock: `-m pip install` failed, see its last words above")
    assert words in done.stderr
    assert not (clone / ".venv" / "penstock-setup.json").exists()


@pytest.mark.thorough
def test_another_python_makes_the_environment_anew(clone: Path) -> None:
    finished_before(clone, "exit 0")
    stamp = clone / ".venv" / "penstock-setup.json"
    stamp.write_text(stamp.read_text().replace('"python": "3.', '"python": "4.'))
    kept = bootstrap(clone)
    assert "Making" not in kept.stdout
    (clone / "requirements.lock").write_text("--hash=none\n")
    finished = json.loads(stamp.read_text()) | {"python": "4.0"}
    stamp.write_text(json.dumps(finished))
    chosen = bootstrap(clone, "--chosen", PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "Making a virtual environment" in chosen.stdout


@pytest.mark.parametrize("apt", ["exit 0", "echo Could not resolve a host; exit 100"])
def test_chromium_is_installed_where_it_is_missing(clone: Path, tmp_path: Path, apt: str) -> None:
    binaries = tmp_path / "binaries"
    binaries.mkdir()
    for name, words in (("apt-get", f'echo "$@" >> {clone}/calls\n{apt}'), ("sudo", 'exec "$@"'), ("id", "echo 1000")):
        (binaries / name).write_text(f"#!/bin/sh\n{words}\n")
        (binaries / name).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    environment = os.environ | {"PATH": str(binaries), "SHELL": "/bin/sh"}
    done = subprocess.run([make, "browser"], cwd=clone, env=environment, capture_output=True, text=True, timeout=30)
    if apt == "exit 0":
        assert done.returncode == 0, done.stderr
        assert calls(clone) == ["update", "install --yes --no-install-recommends chromium fonts-liberation"]
    else:
        assert done.returncode != 0
        assert "penstock: The tests of the page need Chromium, and sudo apt-get cannot install it" in done.stderr


def test_continuous_integration_runs_exactly_make_test_all(tmp_path: Path) -> None:
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
    assert done.stdout == f"{ROOT}: make test-all JOBS=2\n"


def test_the_parts_of_the_tests_are_all_of_them() -> None:
    """Each test without a GPU or a proxy is either in `make test` or once in the remainder."""
    makefile = (ROOT / "Makefile").read_text()
    names = ["thorough", "slow", "drill", "gpu", "multigpu", "fleet"]
    variables = ("SHORT", "QUICK", "THOROUGH", "SLOW")
    (short, *parts) = (re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE) for name in variables)
    quick, thorough, slow = (part.replace("$(SHORT)", short[0]) for (part,) in parts)
    for values in itertools.product([False, True], repeat=len(names)):
        marks: dict[str, Any] = dict(zip(names, values, strict=True))
        assert eval(quick, {}, marks) + eval(thorough, {}, marks) + eval(slow, {}, marks) == (
            not any(marks[name] for name in ("gpu", "multigpu", "fleet"))
        )


def test_make_installs_from_hashes_alone() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert installs
    for line in installs:
        assert "--require-hashes --no-deps" in line, line


@pytest.mark.parametrize(
    ("lock", "names"), [("fleet.lock", ["ENVOY", "SEAWEEDFS", "KUBECTL"]), ("engines.lock", ["ENGINES"])]
)
def test_the_locks_of_make_fleet_have_the_versions_of_the_makefile(lock: str, names: list[str]) -> None:
    makefile, locked = (ROOT / "Makefile").read_text(), (ROOT / lock).read_text()
    for name in names:
        (versions,) = re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)
        for version in versions.split():
            assert f"\n{version} \\\n    --hash=sha256:" in locked, version
