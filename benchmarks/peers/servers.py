"""The compared servers: path, and batch and wait tuned by hand for each model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import BenchError

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".peers"
CACHE = HOME / "cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The best settings for a model, tuned by hand; see each peer's README.md.

    Args:
        max_batch: The largest batch, in rows.
        max_wait_ms: Wait for a batch to fill, in milliseconds.
        max_queue: Queue length from which requests are rejected, if the server can do that.
        http: Processes or threads that read requests, if the server has such an option.
    """

    max_batch: int
    max_wait_ms: float = 0.0
    max_queue: int = 1024
    http: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedServer:
    """One server.

    Args:
        name: Its folder here and its virtual environment.
        label: Its name in tables.
        path: URL path of a request; `{model}` is replaced by the model's name.
        tuning: Settings by model; empty for Penstock, which needs none.
        headers: More lines of a request's head, each ended by CRLF.
    """

    name: str
    label: str
    path: str
    tuning: Mapping[str, Tuning] = field(hash=False)
    headers: str = ""

    @property
    def folder(self) -> Path:
        """Folder of its server.py and requirements.txt."""
        return ROOT / "benchmarks" / "peers" / self.name

    @property
    def environment(self) -> Path:
        """Its virtual environment."""
        return HOME / self.name

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """Return the command that serves a bundle."""
        if not self.tuning:
            return [str(ROOT / ".venv/bin/penstock"), "serve", str(bundle), "--port", str(port), "--cache", str(CACHE)]
        tuning = self.tuning[model]
        return [
            str(self.environment / "bin/python"),
            str(self.folder / "server.py"),
            str(bundle),
            f"--port={port}",
            f"--max-batch={tuning.max_batch}",
            f"--max-wait-ms={tuning.max_wait_ms:g}",
            f"--max-queue={tuning.max_queue}",
            f"--http={tuning.http}",
        ]


PENSTOCK = ComparedServer(name="penstock", label="Penstock", path="/v1/apps/{model}", tuning={})
SERVERS = (
    PENSTOCK,
    ComparedServer(
        name="yardstick",
        label="yardstick",
        path="/predict",
        tuning={"cnn": Tuning(max_batch=32), "mlp": Tuning(max_batch=32)},
    ),
    ComparedServer(
        name="mosec",
        label="Mosec",
        path="/predict",
        tuning={
            "cnn": Tuning(max_batch=32, max_wait_ms=1, max_queue=800),
            "mlp": Tuning(max_batch=32, max_wait_ms=1, max_queue=40),
        },
    ),
    ComparedServer(
        name="triton",
        label="Triton (Python backend)",
        path="/v2/models/{model}/infer",
        # No JSON before the tensor's bytes.
        headers="Inference-Header-Content-Length: 0\r\n",
        tuning={"cnn": Tuning(max_batch=32, http=2), "mlp": Tuning(max_batch=32, http=2)},
    ),
    ComparedServer(
        name="fastapi",
        label="FastAPI",
        path="/predict",
        tuning={"cnn": Tuning(max_batch=32, max_queue=200), "mlp": Tuning(max_batch=32, max_queue=40)},
    ),
    ComparedServer(
        name="litserve",
        label="LitServe",
        path="/predict",
        tuning={"cnn": Tuning(max_batch=32, max_wait_ms=1), "mlp": Tuning(max_batch=32, max_wait_ms=1)},
    ),
    ComparedServer(
        name="bentoml",
        label="BentoML",
        path="/predict",
        tuning={"cnn": Tuning(max_batch=32, max_wait_ms=1000), "mlp": Tuning(max_batch=32, max_wait_ms=1000)},
    ),
    ComparedServer(
        name="ray_serve",
        label="Ray Serve",
        path="/predict",
        tuning={"cnn": Tuning(max_batch=32, max_wait_ms=2), "mlp": Tuning(max_batch=32, max_wait_ms=2)},
    ),
)

# Not the yardstick: it shows the ceiling that language and kernel allow, and is no server that people use.
PEERS = tuple(server for server in SERVERS if server.name not in ("penstock", "yardstick"))


def select_servers(names: list[str]) -> tuple[ComparedServer, ...]:
    """Return the servers of these names; all if there are none.

    Raises:
        BenchError: There is no such server.
    """
    known = {server.name: server for server in SERVERS}
    for name in names:
        if name not in known:
            raise BenchError(f"there is no server {name!r} to compare; choose of {', '.join(known)}.")
    return tuple(known[name] for name in names) if names else SERVERS
