"""Make the virtual environment in .venv, or leave it as it is when nothing changed. Run by the Makefile.

Standard library only, and written so that a Python as old as 3.6 reads it far enough to say that it is too old.
"""

import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "penstock-setup.json")
LOCK = os.path.join(ROOT, "requirements.lock")
# The build, for the CPU or for a version of CUDA, is the one of the index that pip is configured for. torch.lock has
# hashes of those on PyPI, torch-cpu.lock of the CPU builds of the container images.
TORCH = "torch==2.13.0"


FAILED = (
    "`{}` failed, see its last words above: check the network, the disk and pip's settings (pip config list), "
    "and run the command again{}."
)


class Refusal(Exception):
    """The reason why set-up stops, in one sentence."""


def main(arguments):
    """Set up; the exit status is 0, or 1 after one sentence on stderr."""
    try:
        ensure_environment("--chosen" in arguments, "--unchecked-torch" in arguments)
    except (Refusal, OSError) as reason:
        sys.stderr.write(f"penstock: {reason}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\npenstock: Set-up was interrupted; the next run begins it again.\n")
        return 130
    return 0


def ensure_environment(chosen, unchecked_torch):
    """Make .venv what requirements.lock says.

    `chosen`: the user named this Python. `unchecked_torch`: the user takes a build of torch without a known hash.
    """
    with open(LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another set-up in this folder to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        done, want = stamped(), wanted()
        usable = done.get("root") == want["root"] and (not chosen or done.get("python") == want["python"])
        installed = usable and done.get("inputs") == want["inputs"]
        if installed and done.get("compiled") == want["compiled"]:
            return
        if usable:
            os.remove(STAMP)
        else:
            refuse_unfit_python()
            make_venv()
        if not installed:
            install(unchecked_torch)
        compile_modules()
        with open(STAMP + ".new", "w") as file:
            json.dump(want, file)
        os.replace(STAMP + ".new", STAMP)


def wanted():
    """The stamp of a finished set-up."""
    inputs = ("pyproject.toml", "requirements.lock", "torch.lock", "torch-cpu.lock", "bootstrap.py")
    compiled = [path[:-3] + kind for path in below_package("*.pxd") for kind in ("py", "pxd")] + below_package("*.c")
    return {
        "inputs": digest_of(inputs),
        # Without a compiler nothing is compiled; once there is one, it is.
        "compiled": digest_of(["setup.py", *compiled]) + str(shutil.which("cc") or shutil.which("gcc")) + headers(),
        "root": ROOT,
        "python": "{}.{}".format(*sys.version_info),
    }


def below_package(pattern):
    """The paths of the package's files with such a name, in order."""
    return sorted(glob.glob(os.path.join(ROOT, "penstock", "**", pattern), recursive=True))


def digest_of(names):
    """The digest of the names and contents of files."""
    digest = hashlib.sha256()
    for name in names:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(os.path.relpath(os.path.join(ROOT, name), ROOT).encode() + file.read())
    return digest.hexdigest()


def headers():
    """Whether Python's headers are there, for the stamp."""
    return str(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))


def stamped():
    """The stamp of the last set-up; empty if it was interrupted or its Python is gone."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if os.path.exists(PYTHON) and isinstance(stamp, dict) else {}


def refuse_unfit_python():
    """Raise `Refusal` if this Python is too old, or cannot make virtual environments."""
    if sys.version_info < OLDEST:
        newer = [name for name in ("python3.11", "python3.12", "python3.13", "python3.14") if runs(name)]
        way = f"run make again with PYTHON={newer[0]}" if newer else "install one and run make with PYTHON=its-path"
        raise Refusal(f"Python {sys.version.split()[0]} is too old, Penstock needs 3.11 or newer: {way}.")
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise Refusal(
            f"{sys.executable} cannot make virtual environments (it lacks venv or ensurepip): install them "
            "(on Debian and Ubuntu: apt-get install python3-venv) and run the command again."
        )


def runs(name):
    """Tell whether a command of that name exists and starts (a version manager's shim may not)."""
    return bool(shutil.which(name)) and subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL) == 0


def make_venv():
    """Make an empty .venv; remove an existing one."""
    if os.path.exists(VENV):
        say("Removing the unfinished or foreign .venv")
        shutil.rmtree(VENV)
    say(f"Making a virtual environment in .venv with Python {sys.version.split()[0]}")
    run([sys.executable, "-m", "venv", VENV])


def install(unchecked_torch):
    """Install what requirements.lock pins, by its hashes; torch; and penstock itself, editable."""
    say("Installing the dependencies that requirements.lock pins (some minutes the first time)")
    # Modules are compiled when they are first imported: compiling all of them here takes longer than the rest.
    pip = [PYTHON, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    run([*pip, "--require-hashes", "--no-deps", "--requirement", LOCK])
    if unchecked_torch:
        say("Installing torch without a hash, as TORCH=unchecked says")
    else:
        install_torch([*pip, "--require-hashes", "--no-deps", "--requirement"])
    # The libraries of CUDA and Triton, where the build needs them; the CPU's needs nothing more.
    run([*pip, TORCH])
    # What is compiled comes after it, where its messages are seen.
    run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], PENSTOCK_COMPILE="0")
    run([PYTHON, "-m", "pip", "check", "--disable-pip-version-check"])


def install_torch(pip):
    """Install the build of torch that pip's index has, if its hash is known.

    The CPU's comes first, as pip prefers it: given the hashes of both, it would prefer one whose index states its hash.
    """
    cpu, any_build = (os.path.join(ROOT, name) for name in ("torch-cpu.lock", "torch.lock"))
    environment = dict(os.environ, PIP_USER="0")
    tried = subprocess.run([*pip, cpu], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if tried.returncode == 0:
        return
    hint = (
        "; or, if the hash is the reason, torch.lock and torch-cpu.lock do not know the build of torch in pip's index: "
        "take that of PyPI, or run make setup TORCH=unchecked to install it without a hash"
    )
    if b"No matching distribution" in tried.stderr:
        run([*pip, any_build], hint)
        return
    sys.stderr.write(tried.stderr.decode(errors="replace"))
    raise Refusal(FAILED.format(" ".join([*pip, cpu][1:4]), hint))


def compile_modules():
    """Compile the modules of the server's request path; without a C compiler they are interpreted."""
    say("Compiling the server's request path")
    # What was compiled from an earlier source would be imported before the source.
    for path in below_package("*.so"):
        os.remove(path)
    with open(os.path.join(VENV, "compiled.log"), "w") as log:
        command = [PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"]
        environment = dict(os.environ, PENSTOCK_COMPILE="")
        done = subprocess.call(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    if done:
        raise Refusal(FAILED.format("setup.py build_ext", "; .venv/compiled.log has what it said"))
    if not below_package("*.so"):
        say("It is not compiled, so that requests take more time; .venv/compiled.log says why.")


def run(command, hint="", **variables):
    """Run a command, which shows its progress and its errors itself.

    `hint`: another way out, for the refusal. `variables`: of its environment.
    """
    environment = dict(os.environ, PIP_USER="0", **variables)
    if subprocess.call(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL):
        raise Refusal(FAILED.format(" ".join(command[1:4]), hint))


def say(text):
    """Print a line for the user at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
