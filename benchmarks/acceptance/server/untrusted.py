"""Bytes that a bundle chose and that were executed before it was refused, or shown by `penstock inspect`.

Every Python process of the trial has an audit hook (PEP 578), which logs each file of the bundle's author that is
executed, imported, loaded as a library or started as a program.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.core.bundles.bundle import GOLDEN, BundleFiles, read_bundle, write_bundle
from penstock.core.errors import BenchError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle

TIMEOUT_S = 180
APP = """
import parts
from torch import nn
from penstock import Application, TensorSpec

app = Application(
    name="linear",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="scores", name="scores"),
    model=lambda: nn.Linear(4, 3),
)
"""
PAYLOAD = "import penstock\nopen({!r}, 'w').write('ran')\n"
# Without an import of penstock it declares no application.
PROGRAM = "open({!r}, 'w').write('ran')\n"
HOOK = """
import os
import sys

_log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_chosen = tuple(os.environ["AUDIT_CHOSEN"].split(os.pathsep))


def _hook(event, arguments):
    if event == "exec":
        file = getattr(arguments[0], "co_filename", "")
    elif event == "import":
        file = arguments[1]
    elif event in ("ctypes.dlopen", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        file = arguments[0]
    else:
        return
    if isinstance(file, (str, bytes)) and os.fsdecode(file).startswith(_chosen):
        os.write(_log, os.fsencode(file) + b"\\n")


sys.addaudithook(_hook)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A folder with a bundle, its application, and a file that the payload writes when it runs.

    Args:
        folder: The folder, which is on `sys.path` too.
        ran: The file.
        chosen: Another file that the bundle's author chose; None if all are in the folder.
    """

    folder: Path
    ran: Path
    chosen: Path | None = None

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def write(self, name: str, text: str) -> dict[str, str]:
        """Write a file of the folder; returns its hash as a manifest records it."""
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.format(str(self.ran)))
        return {file.name: sha256(file.read_bytes()).hexdigest()}

    def rewrite(self, **fields: Any) -> None:
        """Write the manifest again with other fields and right hashes."""
        files = read_bundle(self.bundle)
        write_bundle(self.bundle, replace(files.manifest, **fields), files.weights.read_bytes(), files.golden)


def _own_file(case: _Case) -> None:
    case.rewrite(reference=str(case.bundle / "payload.py"), sources=case.write("payload.py", PAYLOAD))
    case.write("bundle/payload.py", PAYLOAD)


def _own_link(case: _Case) -> None:
    case.rewrite(reference=str(case.bundle / "link.py"), sources=case.write("payload.py", PAYLOAD))
    (case.bundle / "link.py").symlink_to(case.folder / "payload.py")


def _own_import_path(case: _Case) -> None:
    case.rewrite(reference="bundle.payload", sources=case.write("payload.py", PAYLOAD))
    case.write("bundle/payload.py", PAYLOAD)


def _parent_package(case: _Case) -> None:
    case.write("outer/__init__.py", PAYLOAD)
    case.rewrite(reference="outer.nothing")


def _program(case: _Case) -> None:
    case.rewrite(reference=str(case.folder / "program.py"), sources=case.write("program.py", PROGRAM))


def _standard_library(case: _Case) -> None:
    assert case.chosen is not None
    case.rewrite(reference="this", sources={"this.py": sha256(case.chosen.read_bytes()).hexdigest()})


def _changed_application(case: _Case) -> None:
    case.write("app.py", PAYLOAD + APP.replace("{", "{{").replace("}", "}}"))


def _changed_module(case: _Case) -> None:
    case.write("parts.py", PAYLOAD)


def _added_module(case: _Case) -> None:
    case.write("added.py", PAYLOAD)
    case.write("parts.py", "import added\n")


def _other_examples(case: _Case) -> None:
    # A pickle that runs a program when it is read.
    (case.bundle / GOLDEN).write_bytes(b"cos\nsystem\n(S'touch %b'\ntR." % os.fsencode(case.ran))


REFUSED: Mapping[str, Callable[[_Case], None]] = {
    "a file of the bundle": _own_file,
    "a link of the bundle": _own_link,
    "an import path into the bundle": _own_import_path,
    "a package around a module that is not there": _parent_package,
    "a program": _program,
    "a module of the standard library": _standard_library,
    "a changed application": _changed_application,
    "a changed module": _changed_module,
    "an added module": _added_module,
    "a pickle as examples": _other_examples,
}
COUNT = len(REFUSED)
# The commands, and whether they import an application that is not refused.
DOORS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "inspect": (("-m", "penstock", "inspect", "{}"), False),
    "inspect --run": (("-m", "penstock", "inspect", "{}", "--run"), True),
    "load": (("-c", "import penstock, sys; penstock.load(sys.argv[1])", "{}"), True),
    "serve": (("-m", "penstock", "serve", "{}", "--port", "0", "--frontends", "1", "--executor", "torch"), True),
}


def executed() -> list[float]:
    """Return the bytes that were executed of each refused bundle, by every command.

    Raises:
        BenchError: The hook sees nothing where an application is imported, or a bundle was not refused.
    """
    counts: list[float] = []
    with TemporaryDirectory(prefix="penstock-untrusted-") as made:
        folder = Path(made)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        files = _write_good(folder / "good")
        control = _Case(folder=files.folder.parent, ran=folder / "ran")
        for door in ("inspect --run", "load"):
            if not _executed(control, door, folder, refused=False):
                raise BenchError(f"the audit hook does not see the application that {door} imports.")
        for number, (name, change) in enumerate(REFUSED.items()):
            shutil.copytree(control.folder, folder / str(number))
            chosen = Path(os.__file__).with_name("this.py") if change is _standard_library else None
            case = _Case(folder=folder / str(number), ran=folder / f"ran-{number}", chosen=chosen)
            case.rewrite(reference=str(case.folder / "app.py"))
            change(case)
            count = sum(_executed(case, door, folder, refused=True) for door in DOORS)
            if case.ran.exists() and not count:
                raise BenchError(f"the audit hook did not see that {name} ran.")
            counts.append(float(count))
    # The sum: a median would hide one of them.
    return [sum(counts)]


def _write_good(folder: Path) -> BundleFiles:
    folder.mkdir()
    (folder / "app.py").write_text(APP)
    (folder / "parts.py").write_text("FACTOR = 2\n")
    found = find_application(str(folder / "app.py"))
    return Bundle.write(found, found.model(), np.eye(4, dtype=np.float32), to=folder / "bundle").files


def _executed(case: _Case, door: str, folder: Path, *, refused: bool) -> int:
    """Run a command; returns the bytes of the files that it executed and that the bundle's author chose."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    words, imports = DOORS[door]
    path = [str(folder / "hook"), str(case.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = [str(case.folder), *([] if case.chosen is None else [str(case.chosen)])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PENSTOCK_CACHE": str(folder / "cache"),
        "AUDIT_LOG": str(log),
        "AUDIT_CHOSEN": os.pathsep.join(chosen),
    }
    command = [sys.executable, *(word.format(case.bundle) for word in words)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not log.exists():
        raise BenchError(f"{door} ran without the audit hook: {done.stderr[-300:]}")
    # `inspect` shows a bundle whose application it does not find.
    if refused and imports and done.returncode == 0 and "not compared" not in done.stdout:
        raise BenchError(f"{door} did not refuse {case.bundle}: {done.stdout[-300:]}")
    return sum(Path(file).stat().st_size for file in log.read_text().splitlines())
