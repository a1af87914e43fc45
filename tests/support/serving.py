"""A small application with faults on request, its bundle, and a real server of it."""

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

import numpy as np

# Doubles four numbers. 13 makes the network raise, 17 gives NaN, 19 ends the process, a negative number takes as many
# seconds; a text/x-number body of "crash" makes decode raise, and 999 makes reply raise.
APPLICATION = """
import os
import time
import numpy as np
from penstock import Application, TensorSpec
from penstock.core.decode import decode_image


def network():
    # Here and not above, so that front-ends, which need no network, do not load torch.
    import torch
    from torch import nn

    class Doubler(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            if (x == 19).any():
                os._exit(19)
            if (x == 13).any():
                raise ValueError("thirteen")
            hold({holds!r})
            time.sleep({sleep_s} + max(0, -float(x.min())))
            return torch.where(x == 17, torch.nan, x * self.factor)

    return Doubler()


def hold(folder):
    if folder and os.path.exists(f"{{folder}}/hold"):
        working = f"{{folder}}/{{os.getpid()}}"
        open(working, "w").close()
        while os.path.exists(f"{{folder}}/hold"):
            time.sleep(0.02)
        os.remove(working)


def decode(body, content_type):
    if body == b"crash":
        raise RuntimeError("decode crashed")
    if body == b"shape":
        return np.zeros(3, np.float32)
    if body == b"kind":
        return np.zeros(4, np.float64)
    if content_type.startswith("image/"):
        return decode_image(body, mode="L", size=(2, 2), max_pixels=1 << 20).astype(np.float32).ravel()
    return np.full(4, float(body.decode()), np.float32)


def reply(output):
    if output[0] == 1998:
        raise RuntimeError("reply crashed")
    return {{"doubled": output.tolist()}}


app = Application(
    name="doubler",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(4,), meaning="their doubles", name="doubles"),
    decode=decode,
    reply=reply,
    accepts=("image/png", "image/jpeg", "text/x-number"),
    max_body_bytes=1 << 20,
    model=":network",
)
"""


def write_doubler(folder: Path, *, sleep_s: float = 0.0, holds: Path | None = None) -> Path:
    """Write the application and its bundle into a folder.

    Args:
        folder: The folder.
        sleep_s: The time that each batch takes.
        holds: A folder. While it has a file `hold`, a batch waits, and has a file there of its process's number.
    """
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    (folder / "app.py").write_text(APPLICATION.format(sleep_s=sleep_s, holds=str(holds or "")))
    found = find_application(str(folder / "app.py"))
    examples = np.arange(8, dtype=np.float32).reshape(2, 4)
    Bundle.write(found, found.model(), examples, to=folder / "bundle")
    return folder / "bundle"


def free_port() -> int:
    """A port that is free, and that the kernel gives to no process that asks for any port."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Not of `random`, which begins alike in each process of the tests.
        port = secrets.choice(range(10_000, first) or range(10_000, 60_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


# Most of these networks cannot be exported, and to find out takes seconds; the budget is one that a busy machine keeps.
LATENCY_S = 5.0
UNLESS_SAID = ("--executor", "torch", "--latency-ms", f"{LATENCY_S * 1000:g}")


def serve_command(bundle: Path | None, *options: str) -> list[str]:
    """Command of `penstock serve` on a free port; with bundle None the options name the models."""
    bundles = [] if bundle is None else [str(bundle)]
    return [sys.executable, "-m", "penstock", "serve", *bundles, "--port", "0", *UNLESS_SAID, *options]


@final
class RunningServer:
    """`penstock serve` in a process of its own, on a free port; with bundle None the options name the models."""

    def __init__(self, bundle: Path | None, *options: str) -> None:
        self.process = subprocess.Popen(
            serve_command(bundle, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert "://" in said, (said, self.process.communicate(timeout=10))
        self.host, self.port = "127.0.0.1", int(said.rstrip("/\n").rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send one request on a new connection; return status, headers by lower-case name and body, decoded if JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return (
            answer.status,
            found,
            json.loads(content) if content and "json" in found.get("content-type", "") else content,
        )

    def raw(self, data: bytes) -> bytes:
        """Send bytes and their end; return the reply until the server closes, once all is answered."""
        with socket.create_connection((self.host, self.port), timeout=20) as connection:
            connection.sendall(data)
            with suppress(OSError):  # the server may be gone already
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def stop(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)

    def log(self) -> str:
        """Stop the server; return its log."""
        if self.process.poll() is None:
            self.stop()
        return self.process.communicate(timeout=20)[1]
