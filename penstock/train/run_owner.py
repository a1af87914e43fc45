"""The owner of a run: one command trains in a folder, and only the newest attempt of a run may name a checkpoint.

RUN/.lock               locked while a command trains; holds its record: host, process, time, command, attempt
RUN/.attempts/00000007  the record of attempt 7, created exclusively; the highest number owns the run
RUN/checkpoints/.step-* a checkpoint being written, which has no name yet

The lock is the kernel's (`flock`): it is free when its owner is dead, however it died, so the same command goes on at
once. But it may not exclude a command on another machine, and a file system may lack it. So each attempt also takes a
number before it reads the run, and then renames away what older attempts have not named yet. An attempt checks the
number after it has made its unnamed folder and before it renames that to its name. So either an older attempt's rename
came first, and the new attempt finds a whole checkpoint, or it fails.

A cluster's engine starts a run again while processes of the attempt before may live on, out of its reach. Attempts of
one launch do not refuse one another: the later start takes its number first, which ends the earlier one, and then waits
a bounded time for the lock. An earlier start that comes late gets no number.

No torch: the launcher of several processes uses this too.
"""

import fcntl
import json
import logging
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
from penstock.core.machine.process_stat import read_stat

log = logging.getLogger(__name__)

LOCK, ATTEMPTS = ".lock", ".attempts"
# Limit of the wait for a lock whose owner is dead: the kernel frees its memory, and that of a GPU, before its files.
DYING_S = 60.0
# A process that was just killed looks alive until it runs once more.
GRACE_S = 0.5
POLL_S = 0.05
# Limit of the wait for an older attempt of the same launch. It looks for a newer one every `FENCE_POLL_S`.
OVERTAKE_S = 20.0
FENCE_POLL_S = 2.0
# Not fewer: a command that has read the newest number must not find the next one free again.
KEPT_ATTEMPTS = 100
MAX_RECORD_BYTES = 65536
_SHOWN_COMMAND = 200


@final
class RunTakenOver(TrainError):
    """A newer attempt of the run has begun, so this one names nothing any more."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of a command by an engine, which may start it again.

    Args:
        token: Equal for all starts of the command, and for no other command.
        start: The number of this start; later ones are higher.
    """

    token: str
    start: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives.

        Raises:
            TrainError: It is something else.
        """
        token, _, start = text.rpartition("/")
        if not token or not start.isdecimal():
            raise TrainError(f"the launch is {text!r}; it must be a token, a slash and a whole number.")
        return cls(token=token, start=int(start))

    def __str__(self) -> str:
        return f"{self.token}/{self.start}"


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
        launch: The token of its `Launch`; empty for a command that no engine started.
        start: The start of its launch.
    """

    host: str
    pid: int
    parent: int | None
    since: str
    command: str
    attempt: int = 0
    launch: str = ""
    start: int = 0

    @classmethod
    def here(cls, *, parent: int | None = None, attempt: int = 0, launch: Launch | None = None) -> Self:
        """Describe this process."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        command = shlex.join(sys.orig_argv)[:2000]
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            parent=parent,
            since=since,
            command=command,
            attempt=attempt,
            launch="" if launch is None else launch.token,
            start=0 if launch is None else launch.start,
        )

    @classmethod
    def parse(cls, data: Any) -> Self | None:
        """Return the owner that a record, or fields of one, describe; None if they describe none."""
        try:
            fields = data if isinstance(data, dict) else json.loads(data)
            # Records of older versions have no launch.
            given = {name: fields[name] for name in cls.__slots__ if name not in ("launch", "start")}
            owner = cls(**given, launch=fields.get("launch", ""), start=fields.get("start", 0))
            host, command, _ = owner.host + "", owner.command + "", owner.launch + ""
            wrong = owner.pid < 1 or owner.attempt < 0 or owner.start < 0
            return None if wrong or not host or not command else owner
        except (ValueError, KeyError, TypeError):
            return None

    def is_start_before(self, other: "Owner | None") -> bool:
        """True if another one is a later start of the same launch."""
        return other is not None and bool(self.launch) and self.launch == other.launch and self.start < other.start

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
            RunTakenOver: A later start of the same launch has begun.
        """
        token, number = secrets.token_hex(8), 0
        with _writing(folder):
            place = folder / ATTEMPTS
            place.mkdir(exist_ok=True)
            while True:
                number = max(number, newest_attempt(folder))
                newest = Owner.parse(_read(place / _name(number)))
                if owner.is_start_before(newest):
                    raise _taken_over(folder, newest)
                number += 1
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
        found = _read(self.folder / ATTEMPTS / _name(newest_attempt(self.folder)))
        if found != self.record:
            raise _taken_over(self.folder, Owner.parse(found))


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
def owned(folder: Path, parent: int | None = None, launch: Launch | None = None) -> Generator[RunAttempt]:
    """Own a run's folder while the context is open, so that no other command trains in it.

    Args:
        folder: RUN.
        parent: The process that this one does not outlive.
        launch: The engine's start of this command; an earlier start of the same launch is overtaken.

    Raises:
        TrainError: Another command trains in it.
        RunTakenOver: A later start of the same launch does.
    """
    with _writing(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    held = [descriptor]
    # The lock belongs to the open file, which a forked process has too, and that may outlive a killed owner.
    os.register_at_fork(after_in_child=lambda: _close(held))
    try:
        owner = Owner.here(parent=parent, launch=launch)
        attempt = _overtake(descriptor, folder, owner)
        if attempt is None:
            _take(descriptor, folder)
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


def is_abandoned(folder: Path) -> bool:
    """Check that a folder has the lock of a run and that no process holds it: its command ended, however it did."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # A copy of the records alone.
        return False
    try:
        # Shared: two readers do not take each other for a training.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _overtake(descriptor: int, folder: Path, owner: Owner) -> RunAttempt | None:
    """Take the next number from an older attempt of the same launch; None if none such holds the lock."""
    if not owner.launch or _locked(descriptor):
        return None
    holder = Owner.parse(os.pread(descriptor, MAX_RECORD_BYTES, 0))
    if holder is None or holder.launch != owner.launch:
        return None
    attempt = RunAttempt.claim(folder, owner)
    deadline_s = time.monotonic() + OVERTAKE_S
    while not _locked(descriptor):
        if time.monotonic() > deadline_s:
            # It may be stopped, or on a machine that is cut off. It names nothing any more.
            log.warning("an older attempt still holds the lock of %s and is passed over (%s)", folder, holder)
            break
        time.sleep(POLL_S)
    return attempt


def _locked(descriptor: int) -> bool:
    """Take the lock; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(descriptor: int, folder: Path) -> None:
    began_s = time.monotonic()
    while not _locked(descriptor):
        owner = Owner.parse(os.pread(descriptor, MAX_RECORD_BYTES, 0))
        limit_s = DYING_S if owner is not None and owner.is_dying else GRACE_S
        if time.monotonic() - began_s > limit_s:
            who = "" if owner is None else f" ({owner})"
            raise TrainError(f"another command trains in {folder} now{who}; wait for its end, or give another --out.")
        time.sleep(POLL_S)


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


def _taken_over(folder: Path, owner: Owner | None) -> RunTakenOver:
    who = "its record is gone" if owner is None else str(owner)
    return RunTakenOver(
        f"another command has taken over the run in {folder}, so this one has ended ({who}); let one command train in "
        f"it, or give another --out."
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


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
    stat = read_stat(pid)
    return stat is not None and stat.exiting
