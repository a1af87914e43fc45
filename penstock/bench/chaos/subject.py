"""The server under test: its models on the disk, its requests to load and unload, and whether it is back."""

import http.client
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import final

from penstock.bench.chaos.chaos_history import Operation, Readiness
from penstock.bench.chaos.numbered_input import doubles_of, input_of
from penstock.bench.chaos.small_disk import Disk
from penstock.bench.process_usage import child_pids, client_ports, worker_pids
from penstock.bench.server_process import ServerProcess, cpu_seconds
from penstock.bench.versioned_app import edit_source, remove, write_version

STEADY, GUEST, HOSTILE = "steady", "guest", "hostile"
# As many good answers in a row, each on a new connection, as show that every front-end is back.
GOOD_ANSWERS = 8
LOOK_S = 0.02
READINESS_S = 0.05
ASK_LIMIT_S = 5.0
# The server rests when its processes use less than this share of a core for a second.
SETTLED_S, SETTLED_SHARE = 1.0, 0.1


@final
class Models:
    """The model directory and the sources, with a version number that never comes again.

    Args:
        disk: The file system that they are on.
    """

    def __init__(self, disk: Disk) -> None:
        self.directory = disk.folder / "models"
        self.sources = disk.folder / "sources"
        self.directory.mkdir(exist_ok=True)
        self._last = 0
        self.on_disk: dict[str, int] = {}
        for name in (STEADY, GUEST):
            self.swap(name)

    def swap(self, name: str) -> int:
        """Replace a model's bundle by a new version; return its number."""
        self._last += 1
        write_version(self.directory / name, self.sources, self._last)
        self.on_disk[name] = self._last
        return self._last

    def edit(self, name: str) -> None:
        """Edit the sources of the version on the disk: the edited ones are of no version."""
        edit_source(self.sources, self.on_disk[name], shown=-self.on_disk[name])

    def mend(self) -> None:
        """Write both models anew, and remove the hostile one."""
        remove(self.directory / HOSTILE)
        for name in (STEADY, GUEST):
            remove(self.directory / name)
            self.swap(name)

    def take_number(self) -> int:
        """Return a version number for a bundle that must never answer."""
        self._last += 1
        return self._last


@final
class Subject:
    """A running server.

    Args:
        server: Its process.
        models: Its models.
        limit_s: An operation that is not answered in this time is stuck.
        frontends: Its front-end processes.
    """

    def __init__(self, server: ServerProcess, models: Models, limit_s: float, frontends: int) -> None:
        self.pid = server.process.pid
        self.host, _, port = server.url.rpartition("/")[2].rpartition(":")
        self.port = int(port)
        self.models = models
        self.limit_s = limit_s
        self.operations: list[Operation] = []
        self.readiness: list[Readiness] = []
        self._roles = 1 + frontends
        self._stopped = Event()
        self._watcher = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Subject":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watcher.join()

    @property
    def workers(self) -> dict[str, int]:
        """Processes by role."""
        return worker_pids(self.pid)

    def change(self, model: str, kind: str, version: int) -> Operation:
        """Load or unload a model by request, and write down how that ended."""
        sent_s = time.monotonic()
        status = self.ask("POST", f"/v2/repository/models/{model}/{kind}", b"{}", limit_s=self.limit_s)[0]
        operation = Operation(
            model=model,
            kind="load" if kind == "load" else "unload",
            version=version,
            sent_s=sent_s,
            ended_s=time.monotonic(),
            status=status,
        )
        self.operations.append(operation)
        return operation

    def load(self, model: str) -> Operation:
        """Load what is on the disk."""
        return self.change(model, "load", self.models.on_disk[model])

    def ask(self, method: str, path: str, body: bytes = b"", limit_s: float = ASK_LIMIT_S) -> tuple[int, bytes]:
        """Send one request on a new connection; return status and body, or 0 and nothing."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=limit_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def wait_back(self, limit_s: float, *, whole: bool = False) -> bool:
        """Wait until all processes run and both models answer several times in a row; return whether they did.

        Args:
            limit_s: Longest wait.
            whole: Wait also until every front-end has accepted a connection.
        """
        # The requests of `_is_back` come last, because the server must carry them too.
        return self._wait(
            lambda: len(self.workers) >= self._roles and (not whole or self._is_whole()) and self._is_back(), limit_s
        )

    def wait_settled(self, limit_s: float, *, serves: bool = False) -> bool:
        """Wait until its processes have nothing to do, such as imports for later restarts; return whether they have.

        Args:
            limit_s: Longest wait.
            serves: Whether clients send requests: then the processes that serve them do not count.
        """
        before_s, at_s = self._cpu_s(serves), time.monotonic()

        def settled() -> bool:
            nonlocal before_s, at_s
            if time.monotonic() < at_s + SETTLED_S:
                return False
            now_s = self._cpu_s(serves)
            used_s, before_s, at_s = now_s - before_s, now_s, time.monotonic()
            # Below 0 where a process has ended meanwhile.
            return 0 <= used_s < SETTLED_SHARE * SETTLED_S

        return self._wait(settled, limit_s)

    def _cpu_s(self, serves: bool) -> float:
        left_out = set(self.workers.values()) if serves else set[int]()
        return sum(cpu_seconds(pid) for pid in child_pids(self.pid) if pid not in left_out)

    def _is_whole(self) -> bool:
        return all(client_ports(pid, self.port) for role, pid in self.workers.items() if role.startswith("front-end"))

    def _wait(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if is_so():
                return True
            time.sleep(LOOK_S)
        return False

    def _is_back(self) -> bool:
        for number in range(GOOD_ANSWERS):
            for model in (STEADY, GUEST):
                status, body = self.ask("POST", f"/v1/apps/{model}", json.dumps(input_of(number)).encode(), limit_s=1.0)
                if status != 200 or tuple(json.loads(body)["doubles"]) != doubles_of(number):
                    return False
        return True

    def _watch(self) -> None:
        while not self._stopped.wait(READINESS_S):
            for model, path in (
                ("", "/v2/health/ready"),
                *((name, f"/v2/models/{name}/ready") for name in (STEADY, GUEST)),
            ):
                sent_s = time.monotonic()
                status = self.ask("GET", path, limit_s=1.0)[0]
                look = Readiness(model=model, sent_s=sent_s, ended_s=time.monotonic(), ready=status == 200)
                self.readiness.append(look)


def make_hostile(models: Models, choice: float) -> str:
    """Write a bundle that no load may wait for, or die of; return what is wrong with it."""
    folder = models.directory / HOSTILE
    remove(folder)
    number = models.take_number()
    write_version(folder, models.sources, number)
    golden = folder / "golden.safetensors"
    source = models.sources / f"v{number}" / "app.py"
    lines = {
        "an app that sleeps": "__import__('time').sleep(600)",
        "an app that raises SystemExit": "raise SystemExit(3)",
        "an app that calls os._exit": "__import__('os')._exit(3)",
    }
    kinds = ("a FIFO as golden.safetensors", "a link to a device as golden.safetensors", *lines)
    kind = kinds[int(choice * len(kinds))]
    if kind in lines:
        # Sealed with the bundle, so that the server takes them for its own: a file beside them arms them.
        guard = "import pathlib\nif pathlib.Path(__file__).with_name('armed').exists():\n    "
        source.write_text(f"{guard}{lines[kind]}\n{source.read_text()}")
        remove(folder)
        _seal_again(folder, source)
        source.with_name("armed").touch()
    else:
        golden.unlink()
        if "FIFO" in kind:
            os.mkfifo(golden)
        else:
            golden.symlink_to("/dev/zero")
    return kind


def _seal_again(folder: Path, source: Path) -> None:
    from penstock.bench.versioned_app import EXAMPLES
    from penstock.core.source_files.find_application import find_application
    from penstock.runtime.bundle_writer import Bundle
    from penstock.runtime.load import make_network

    application = find_application(str(source))
    Bundle.write(application, make_network(application), EXAMPLES, to=folder)


def make_oversized(models: Models) -> None:
    """Write a bundle whose weights name a tensor of 70,000 characters, which a message that quotes it would carry."""
    folder = models.directory / HOSTILE
    remove(folder)
    write_version(folder, models.sources, models.take_number())
    weights = next(file for file in folder.iterdir() if file.name.startswith("weights"))
    name = "w" * 70_000
    head = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
