"""Bringing planned faults about."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import final

from penstock.bench.chaos import fault_schedule as schedule
from penstock.bench.chaos.chaos_history import Event
from penstock.bench.chaos.fault_schedule import Planned
from penstock.bench.chaos.small_disk import Disk
from penstock.bench.chaos.subject import GUEST, HOSTILE, STEADY, Subject, make_hostile, make_oversized
from penstock.bench.process_usage import client_ports
from penstock.bench.versioned_app import remove

# A name and a body that are longer than any message or limit should let through.
LONG_NAME, LONG_BODY = 60_000, 4 << 20
UNLOADED_S = 0.1


@final
class Faults:
    """Brings planned faults about.

    Args:
        subject: The server.
        disk: Its disk.
        watchdog_s: The server's own time after which it replaces a process that hangs.
    """

    def __init__(self, subject: Subject, disk: Disk, watchdog_s: float) -> None:
        self._subject = subject
        self._disk = disk
        self._watchdog_s = watchdog_s
        self._ports = frozenset[int]()
        self._skipped = ""
        self._actions: dict[str, Callable[[Planned], str]] = {
            schedule.KILL_FRONTEND: lambda planned: self._kill(planned, "front-end"),
            schedule.KILL_ENGINE: lambda planned: self._kill(planned, "engine"),
            schedule.STOP_FRONTEND: lambda planned: self._stop(planned, "front-end"),
            schedule.STOP_ENGINE: lambda planned: self._stop(planned, "engine"),
            schedule.HANG_FRONTEND: lambda planned: self._hang(planned, "front-end"),
            schedule.HANG_ENGINE: lambda planned: self._hang(planned, "engine"),
            schedule.DISK_FULL: self._fill_disk,
            schedule.OVERSIZED: self._send_oversized,
            schedule.HOSTILE: self._load_hostile,
            schedule.EDIT: self._edit,
            schedule.SWAP: self._swap,
            schedule.LOAD: self._load,
            schedule.UNLOAD: self._unload,
        }
        assert self._actions.keys() == set(schedule.KINDS)

    def bring_about(self, planned: Planned, left_s: float) -> Event:
        """Do what is planned; return when it began and was over. A hang is skipped where less than its time is left."""
        self._ports, self._skipped = frozenset(), ""
        begun_s = time.monotonic()
        hangs = planned.kind in (schedule.HANG_FRONTEND, schedule.HANG_ENGINE)
        if hangs and left_s < self._watchdog_s:
            detail, self._skipped = "", f"the watchdog's {self._watchdog_s:g} s are longer than the time left"
        else:
            detail = self._actions[planned.kind](planned)
        over_s = time.monotonic()
        return Event(
            number=planned.number,
            kind=planned.kind,
            detail=detail,
            begun_s=begun_s,
            over_s=min(over_s, begun_s + self._watchdog_s) if hangs else over_s,
            ports=self._ports,
            skipped=self._skipped,
        )

    def _chosen(self, planned: Planned, role: str) -> tuple[str, int]:
        workers = sorted((name, pid) for name, pid in self._subject.workers.items() if name.startswith(role))
        if not workers:
            self._skipped = f"no {role} runs"
            return role, 0
        return workers[int(planned.choice * len(workers))]

    def _stopped(self, planned: Planned, role: str) -> tuple[str, int]:
        name, pid = self._chosen(planned, role)
        if pid:
            try:
                # Before the table of its connections is read, so that it accepts none meanwhile.
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                self._skipped = f"{name} has just ended"
                return name, 0
        return name, pid

    def _held(self, name: str, pid: int) -> frozenset[int]:
        if name.startswith("engine"):
            return frozenset()
        with suppress(OSError):
            return client_ports(pid, self._subject.port) - {0}
        return frozenset()

    def _kill(self, planned: Planned, role: str) -> str:
        name, pid = self._stopped(planned, role)
        if pid:
            self._ports = self._held(name, pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{name}, which held {len(self._ports)} connections"

    def _stop(self, planned: Planned, role: str) -> str:
        name, pid = self._stopped(planned, role)
        if pid:
            time.sleep(planned.stop_s)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return f"{name} for {planned.stop_s:.2f} s"

    def _hang(self, planned: Planned, role: str) -> str:
        name, pid = self._stopped(planned, role)
        if not pid:
            return name
        self._ports = self._held(name, pid)
        end_s = time.monotonic() + 3 * self._watchdog_s + 2
        while time.monotonic() < end_s and pid in self._subject.workers.values():
            time.sleep(0.02)
        if pid not in self._subject.workers.values():
            return f"{name}, which the watchdog ended"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return f"{name}, which no watchdog ended within {3 * self._watchdog_s + 2:g} s"

    def _fill_disk(self, planned: Planned) -> str:
        if self._disk.why_not:
            self._skipped = self._disk.why_not
            return "disk"
        self._subject.models.swap(STEADY)
        self._disk.fill()
        try:
            operation = self._subject.load(STEADY)
        finally:
            self._disk.empty()
        return f"a load meanwhile was answered with {operation.status}"

    def _send_oversized(self, planned: Planned) -> str:
        match int(planned.choice * 3):
            case 0:
                status = self._subject.ask("POST", f"/v1/apps/{STEADY}", b"[" * LONG_BODY)[0]
                return f"a body of {LONG_BODY:,} bytes, answered with {status}"
            case 1:
                operation = self._subject.change("n" * LONG_NAME, "load", 0)
                return f"a load of a name of {LONG_NAME:,} characters, answered with {operation.status}"
            case _:
                make_oversized(self._subject.models)
                operation = self._subject.change(HOSTILE, "load", 0)
                remove(self._subject.models.directory / HOSTILE)
                return f"a load of a bundle with a tensor's name of 70,000 characters, answered with {operation.status}"

    def _load_hostile(self, planned: Planned) -> str:
        kind = make_hostile(self._subject.models, planned.choice)
        other = Thread(target=self._subject.change, args=(HOSTILE, "load", 0))
        other.start()
        beside = self._subject.load(GUEST)
        other.join()
        golden = self._subject.models.directory / HOSTILE / "golden.safetensors"
        if golden.is_fifo():
            # Whoever still waits for the FIFO's bytes goes on.
            with suppress(OSError):
                os.close(os.open(golden, os.O_WRONLY | os.O_NONBLOCK))
        remove(self._subject.models.directory / HOSTILE)
        return f"{kind}; a load of another model beside it was answered with {beside.status}"

    def _edit(self, planned: Planned) -> str:
        self._subject.models.edit(STEADY)
        return f"of version {self._subject.models.on_disk[STEADY]} of {STEADY}, not loaded"

    def _swap(self, planned: Planned) -> str:
        return f"{STEADY}: version {self._subject.models.swap(STEADY)} on the disk, not loaded"

    def _load(self, planned: Planned) -> str:
        name = (STEADY, GUEST)[int(planned.choice * 2)]
        version = self._subject.models.swap(name)
        return f"{name}: version {version}, answered with {self._subject.load(name).status}"

    def _unload(self, planned: Planned) -> str:
        version = self._subject.models.on_disk[GUEST]
        first = self._subject.change(GUEST, "unload", version)
        time.sleep(UNLOADED_S)
        second = self._subject.load(GUEST)
        return f"{GUEST}: answered with {first.status} and {second.status}"


def is_listening(host: str, port: int) -> bool:
    """True if a connection is accepted."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
