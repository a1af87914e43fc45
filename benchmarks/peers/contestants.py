"""Who is compared: each server's address, and its batch and wait, tuned by hand for each model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import BenchError

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".peers"
CACHE = HOME / "cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What was found best for a model by hand; each peer's README.md says how.

    Args:
        max_batch: The largest batch, in rows.
        max_wait_ms: How long a batch waits to fill, in milliseconds.
        max_queue: With so many waiting, more are refused, where the server can do that.
    """

    max_batch: int
    max_wait_ms: float = 0.0
    max_queue: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One server.

    Args:
        name: Its folder here, and its virtual environment's.
        label: What it is called in tables.
        path: The URL path that a request is posted to; `{model}` stands for the model's name.
        tuned: By model; empty for Penstock, which has nothing to tune.
        headers: More lines of a request's head, each ended by CRLF.
    """

    name: str
    label: str
    path: str
    tuned: Mapping[str, Tuned] = field(hash=False)
    headers: str = ""

    @property
    def folder(self) -> Path:
        """Where its server.py and requirements.txt are."""
        return ROOT / "benchmarks" / "peers" / self.name

    @property
    def environment(self) -> Path:
        """Its virtual environment."""
        return HOME / self.name

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """What starts it on a bundle."""
        if not self.tuned:
            return [str(ROOT / ".venv/bin/penstock"), "serve", str(bundle), "--port", str(port), "--cache", str(CACHE)]
        tuned = self.tuned[model]
        return [
            str(self.environment / "bin/python"),
            str(self.folder / "server.py"),
            str(bundle),
            f"--port={port}",
            f"--max-batch={tuned.max_batch}",
            f"--max-wait-ms={tuned.max_wait_ms:g}",
            f"--max-queue={tuned.max_queue}",
        ]


PENSTOCK = Contestant(name="penstock", label="Penstock", path="/v1/apps/{model}", tuned={})
CONTESTANTS = (
    PENSTOCK,
    Contestant(
        name="yardstick",
        label="yardstick",
        path="/predict",
        tuned={"cnn": Tuned(max_batch=32), "mlp": Tuned(max_batch=32)},
    ),
    Contestant(
        name="mosec",
        label="Mosec",
        path="/predict",
        tuned={
            "cnn": Tuned(max_batch=32, max_wait_ms=1, max_queue=800),
            "mlp": Tuned(max_batch=32, max_wait_ms=1, max_queue=40),
        },
    ),
    Contestant(
        name="triton",
        label="Triton (Python backend)",
        path="/v2/models/{model}/infer",
        # No JSON before the tensor's bytes.
        headers="Inference-Header-Content-Length: 0\r\n",
        tuned={"cnn": Tuned(max_batch=32), "mlp": Tuned(max_batch=32)},
    ),
    Contestant(
        name="fastapi",
        label="FastAPI",
        path="/predict",
        tuned={"cnn": Tuned(max_batch=32, max_queue=200), "mlp": Tuned(max_batch=32, max_queue=40)},
    ),
    Contestant(
        name="litserve",
        label="LitServe",
        path="/predict",
        tuned={"cnn": Tuned(max_batch=32, max_wait_ms=1), "mlp": Tuned(max_batch=32, max_wait_ms=1)},
    ),
    Contestant(
        name="bentoml",
        label="BentoML",
        path="/predict",
        tuned={"cnn": Tuned(max_batch=32, max_wait_ms=1000), "mlp": Tuned(max_batch=32, max_wait_ms=1000)},
    ),
    Contestant(
        name="ray_serve",
        label="Ray Serve",
        path="/predict",
        tuned={"cnn": Tuned(max_batch=32, max_wait_ms=2), "mlp": Tuned(max_batch=32, max_wait_ms=2)},
    ),
)


def chosen(names: list[str]) -> tuple[Contestant, ...]:
    """The contestants of these names; all where there is none.

    Raises:
        BenchError: There is no such contestant.
    """
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    for name in names:
        if name not in known:
            raise BenchError(f"there is no server {name!r} to compare; choose of {', '.join(known)}.")
    return tuple(known[name] for name in names) if names else CONTESTANTS
