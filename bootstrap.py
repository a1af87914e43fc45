"""Make the virtual environment in .venv, or leave it as it is when nothing changed. Run by the Makefile.

    python3 bootstrap.py             the environment: pinned dependencies and penstock itself, editable
    python3 bootstrap.py browser     Chromium, which the tests of the page need

Standard library only, and written so that a Python as old as 3.6 reads it far enough to say that it is too old.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "penstock-setup.json")
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# What a failed command said, and the sentence that it comes to. The first that fits is given.
CAUSES = (
    (
        r"No space left on device|Errno 28\b|Disk quota exceeded|Errno 122\b",
        "The disk is full: set-up needs several GB in {root} and in pip's cache; free some and run the command again.",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError"
        r"|connection broken by|Max retries exceeded|Temporary failure (in name resolution|resolving)|Could not resolve"
        r"|Network is unreachable",
        "The package index cannot be reached: check the network, or pip's proxy and index settings (pip config list), "
        "and run the command again.",
    ),
    (
        r"(No matching distribution found for|The user requested \(constraint\)) (?P<package>\S+)",
        "pip found no {package} for this Python ({python}): allow it a package index (pip config list shows its "
        "settings), or choose another Python with PYTHON=python3.12.",
    ),
    (
        r"Permission denied|Errno 13\b|Read-only file system|Errno 30\b",
        "{root} cannot be written to: give yourself the right to, or clone the repository where you have it.",
    ),
)


class Refusal(Exception):
    """What stops the set-up, in one sentence."""


def main(arguments):
    """Run one of the two set-up steps; the exit status is 0, or 1 after one sentence on stderr."""
    try:
        if "browser" in arguments:
            ensure_browser()
        else:
            ensure_environment("--chosen" in arguments)
    except Refusal as refusal:
        sys.stderr.write(f"penstock: {refusal}\n")
        return 1
    except OSError as error:
        sys.stderr.write("penstock: {}\n".format(cause_of(str(error)) or f"Set-up failed: {error}."))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\npenstock: Set-up was interrupted; the next run begins it again.\n")
        return 130
    return 0


def ensure_environment(chosen):
    """Make .venv what pyproject.toml and constraints.txt ask for. `chosen`: this Python was named by the user."""
    if is_current(chosen):
        return
    with open(CONSTRAINTS) as lock:
        wait_for(lock)
        if is_current(chosen):
            return
        if not is_usable(chosen):
            refuse_unfit_python()
            make_venv()
        elif os.path.exists(STAMP):
            os.remove(STAMP)
        install()
        with open(STAMP + ".new", "w") as file:
            json.dump(wanted(), file)
        os.replace(STAMP + ".new", STAMP)


def wanted():
    """What the stamp of a finished set-up says."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "bootstrap.py"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return {"inputs": digest.hexdigest(), "root": ROOT, "python": "{}.{}".format(*sys.version_info)}


def stamped():
    """What the last finished set-up left, or nothing if it was interrupted or its Python is gone."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if os.path.exists(PYTHON) and isinstance(stamp, dict) else {}


def is_current(chosen):
    """Whether nothing is to be done."""
    return is_usable(chosen) and stamped().get("inputs") == wanted()["inputs"]


def is_usable(chosen):
    """Whether .venv was finished once, here, with a Python that will do: then pip can bring it up to date."""
    stamp, want = stamped(), wanted()
    return stamp.get("root") == want["root"] and (not chosen or stamp.get("python") == want["python"])


def wait_for(lock):
    """Let only one set-up run at a time in this folder. The lock ends with the process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        say("Waiting for another set-up in this folder to end")
        fcntl.flock(lock, fcntl.LOCK_EX)


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
    """Whether a command of that name exists and starts (a version manager's shim may not)."""
    return bool(shutil.which(name)) and subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL) == 0


def make_venv():
    """An empty .venv, whatever was there before."""
    if os.path.exists(VENV):
        say("Removing the unfinished or foreign .venv")
        shutil.rmtree(VENV)
    say(f"Making a virtual environment in .venv with Python {sys.version.split()[0]}")
    run([sys.executable, "-m", "venv", VENV])


def install():
    """Fill .venv: the tools that install first, then penstock, editable, with everything that its tests need."""
    # Modules are compiled when they are first imported: compiling all of them here takes longer than the rest.
    pip = [PYTHON, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    pip += ["--constraint", CONSTRAINTS]
    say("Installing the dependencies that constraints.txt pins (some minutes the first time)")
    started = time.time()
    run([*pip, "pip", "setuptools"])
    run([*pip, "--no-build-isolation", "--editable", ROOT + "[dev]"])
    say(f"The environment is ready ({time.time() - started:.0f} s)")


def ensure_browser():
    """Install Debian's Chromium where it is missing and can be installed."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    if not shutil.which("apt-get"):
        raise Refusal("The tests of the page need Chromium: install it with this system's package manager.")
    if os.geteuid() != 0:
        raise Refusal("The tests of the page need Chromium: run `sudo apt-get install chromium` and try again.")
    say("Installing Chromium with apt-get")
    run(["apt-get", "update"])
    run(["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "fonts-liberation"])


def run(command):
    """Run a command while showing what it is at; its words are kept for the sentence that says why it failed."""
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive", PYTHONUNBUFFERED="1", PIP_USER="0")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = follow(process)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        cause = cause_of(output)
        if cause is None:
            sys.stderr.write("\n".join(output.splitlines()[-20:]) + "\n")
            cause = "`{}` failed, see its last words above.".format(" ".join(command[:4]))
        raise Refusal(cause)


def follow(process):
    """All that the process writes. Shows its last line: all the time on a terminal, else every ten seconds."""
    terminal, started, shown, tail, lines = sys.stdout.isatty(), time.time(), time.time(), b"", []
    while True:
        ready = select.select([process.stdout], [], [], 1.0)[0]
        piece = os.read(process.stdout.fileno(), 65536) if ready else None
        if piece == b"":
            break
        if piece:
            *whole, tail = (tail + piece).split(b"\n")
            lines.extend(line.decode("utf-8", "replace") for line in whole)
        if terminal or time.time() - shown >= 10:
            shown = time.time()
            show(lines[-1] if lines else "", shown - started, terminal)
    process.wait()
    if terminal:
        sys.stdout.write("\r\033[K")
    return "\n".join([*lines, tail.decode("utf-8", "replace")])


def show(line, seconds, terminal):
    """One line of progress: the time since the command began and its last line, made short."""
    if line.startswith("Installing collected packages"):
        line = "Installing {} packages".format(line.count(",") + 1)
    width = shutil.get_terminal_size().columns - 10
    text = f"  {int(seconds) // 60}:{int(seconds) % 60:02d} {line.strip()[:width]}"
    sys.stdout.write("\r\033[K" + text if terminal else text + "\n")
    sys.stdout.flush()


def cause_of(output):
    """The sentence for what a failed command said, or None if its words are not known."""
    for pattern, sentence in CAUSES:
        found = re.search(pattern, output)
        if found:
            package = found.groupdict().get("package", "")
            return sentence.format(root=ROOT, package=package, python=sys.version.split()[0])
    return None


def say(text):
    """A line for the user, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
