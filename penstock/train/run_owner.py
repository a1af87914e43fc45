"""The owner of a run: one command trains in a folder, and only the newest attempt of a run may name a checkpoint.

RUN/.lock               locked while a command trains; holds its record: host, process, time, command, attempt
RUN/.attempts/00000007  the record of attempt 7, created exclusively; the highest number owns the run
RUN/checkpoints/.step-* a checkpoint being written, which has no name yet

The lock is the kernel's (`flock`): it is free when its owner is dead, however it died, so the same command goes on at
once. But it may not exclude a command on another machine, and a file system may lack it. So each attempt also takes a
number before it reads the run, and then renames away what older attempts have not named yet. An attempt checks the
number after it has made its unnamed folder and before it renames that to its name. So either an older attempt's rename
came first, and the new attempt finds a whole checkpoint, or it fails.

No torch: the launcher of several processes uses this too.
"""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, final

from penstock.core.errors import TrainError

LOCK, ATTEMPTS = ".lock", ".attempts"
# Limit of the wait for a lock whose owner is dead: the kernel frees its memory, and that of a GPU, before its files.
DYING_S = 60.0
# A process that was just killed looks alive until it runs once more.
GRACE_S = 0.5
POLL_S = 0.05
# Not fewer: a command that has read the newest number must not find the next one free again.
KEPT_ATTEMPTS = 100
MAX_RECORD_BYTES = 65536
_SHOWN_COMMAND = 200
# Linux's PF_EXITING.
_EXITING = 4


@final
class RunTakenOver(TrainError):
    """A newer attempt of the run has begun, so this one names nothing any more."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The command that trains a run.

    Args:
        host: The machine's name.
        pid: Its process, on that machine.
        parent: The process that it does not outlive, such as a launcher; None for none.
        since: Time at which it began, in ISO 8601.
        command: Its command line.
        attempt: The number of this attempt; 0 while it has none.
    """

    host: str
    pid: int
    parent: int | None
    since: str
    command: str
    attempt: int = 0

    @classmethod
    def here(cls, *, parent: int | None = None, attempt: int = 0) -> Self:
        """Describe this process."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        command = shlex.join(sys.orig_argv)[:2000]
        return cls(
            host=socket.gethostname(), pid=os.getpid(), parent=parent, since=since, command=command, attempt=attempt
        )

    @classmethod
    def parse(cls, data: Any) -> Self | None:
        """Return the owner that a record, or fields of one, describe; None if they describe none."""
        try:
            fields = data if isinstance(data, dict) else json.loads(data)
            given = {name: fields[name] for name in cls.__slots__}
            owner = cls(**given)
            host, command = owner.host + "", owner.command + ""
            return None if owner.pid < 1 or owner.attempt < 0 or not host or not command else owner
        except (ValueError, KeyError, TypeError):
            return None

    def fields(self) -> dict[str, Any]:
        """Return the record."""
        return asdict(self)

    def __str__(self) -> str:
        command = " ".join(self.command.split())
        command = command if len(command) <= _SHOWN_COMMAND else f"{command[:_SHOWN_COMMAND]}..."
        return f"process {self.pid} on {self.host}, since {self.since}: {command}"

    @property
    def is_dying(self) -> bool:
        """True if it was of this machine and is dead, or will be because its launcher is."""
        if self.host != socket.gethostname():
            return False
        return _is_dead(self.pid) or (self.parent is not None and _is_dead(self.parent))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunAttempt:
    """An attempt to train a run. The newest one owns the run.

    Args:
        folder: RUN.
        number: Its number.
        record: The content of its file, which holds a token: numbers begin again where a folder was removed.
    """

    folder: Path
    number: int
    record: bytes

    @classmethod
    def claim(cls, folder: Path, owner: Owner) -> Self:
        """Take the next number, exclusively on all machines that share the folder.

        Raises:
            TrainError: It cannot be written.
        """
        token, number = secrets.token_hex(8), 0
        with _writing(folder):
            place = folder / ATTEMPTS
            place.mkdir(exist_ok=True)
            while True:
                number = max(number, newest_attempt(folder)) + 1
                record = json.dumps({**owner.fields(), "attempt": number, "token": token}).encode()
                if _link_new(place / f".{token}", place / _name(number), record):
                    break
            for old in _numbers(folder):
                if old < number - KEPT_ATTEMPTS:
                    (place / _name(old)).unlink(missing_ok=True)
            clear_unnamed(folder / "checkpoints")
        return cls(folder=folder, number=number, record=record)

    def check(self) -> None:
        """Check that no newer attempt has begun.

        Raises:
            RunTakenOver: One has.
        """
        newest = newest_attempt(self.folder)
        try:
            found = (self.folder / ATTEMPTS / _name(newest)).read_bytes()
        except OSError:
            found = b""
        if found == self.record:
            return
        owner = Owner.parse(found)
        who = "its record is gone" if owner is None else str(owner)
        raise RunTakenOver(
            f"another command has taken over the run in {self.folder}, so this one has ended ({who}); let one command "
            f"train in it, or give another --out."
        )


def newest_attempt(folder: Path) -> int:
    """Return the number of the newest attempt of a run; 0 if there is none."""
    return max(_numbers(folder), default=0)


def clear_unnamed(checkpoints: Path) -> None:
    """Remove checkpoints that older attempts have not named, renamed first so that none can be named half removed."""
    for left in checkpoints.glob(".step-*"):
        gone = left.with_name(f".cleared-{secrets.token_hex(8)}")
        # Its writer may rename it at the same time: one of both renames fails.
        with suppress(FileNotFoundError):
            left.rename(gone)
    for gone in checkpoints.glob(".cleared-*"):
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def owned(folder: Path, parent: int | None = None) -> Generator[RunAttempt]:
    """Own a run's folder while the context is open, so that no other command trains in it.

    Args:
        folder: RUN.
        parent: The process that this one does not outlive.

    Raises:
        TrainError: Another command trains in it.
    """
    with _writing(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    held = [descriptor]
    # The lock belongs to the open file, which a forked process has too, and that may outlive a killed owner.
    os.register_at_fork(after_in_child=lambda: _close(held))
    try:
        _take(descriptor, folder)
        owner = Owner.here(parent=parent)
        attempt = RunAttempt.claim(folder, owner)
        with _writing(folder):
            _write_record(descriptor, json.dumps({**owner.fields(), "attempt": attempt.number}).encode())
        yield attempt
    finally:
        _close(held)


def refuse_owned(folder: Path) -> None:
    """Refuse a folder that another command trains in now.

    Raises:
        TrainError: One does, which is named.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _take(descriptor, folder)
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    began_s = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Owner.parse(os.pread(descriptor, MAX_RECORD_BYTES, 0))
            limit_s = DYING_S if owner is not None and owner.is_dying else GRACE_S
            if time.monotonic() - began_s > limit_s:
                who = "" if owner is None else f" ({owner})"
                raise TrainError(
                    f"another command trains in {folder} now{who}; wait for its end, or give another --out."
                ) from None
            time.sleep(POLL_S)
        else:
            return


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"{folder} cannot be written ({error.strerror or error}); free disk space or repair the folder, and give "
            f"the same command again."
        ) from None


def _close(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _write_record(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _link_new(beside: Path, place: Path, data: bytes) -> bool:
    """Write a whole file under a name that did not exist; False if it did."""
    beside.write_bytes(data)
    try:
        os.link(beside, place)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links: the name is exclusive, its content comes after.
        try:
            with place.open("xb") as sink:
                sink.write(data)
        except FileExistsError:
            return False
    finally:
        beside.unlink(missing_ok=True)
    return True


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder / ATTEMPTS) if name.isdigit()]
    except FileNotFoundError:
        return []


def _name(number: int) -> str:
    return f"{number:08d}"


def _is_dead(pid: int) -> bool:
    """True if a process of this machine has ended, reaped or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        # After the name in parentheses, which may hold any character: state, six numbers, flags.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state in ("Z", "X") or bool(int(fields[5]) & _EXITING)
    except (OSError, IndexError, ValueError):
        return False
