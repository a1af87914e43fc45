"""The network of `penstock tiles`: a pack on this CPU, a bundle on a GPU, or a server."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.remote_arguments import pack_at
from penstock.core.errors import ApplicationError, PackError
from penstock.core.pictures.dense import Dense
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from penstock.device.dense_run import DenseRun

if TYPE_CHECKING:
    from penstock.runtime.execution import Execution

# B tiles, T side of a tile, h, w, K a map

# Of a server: a request's body holds so many bytes of tiles; so many requests are in flight.
REQUEST_BYTES = 4 << 20
REQUESTS = 16
LATENCY_MS = 60_000.0
RETRIES, TIMEOUT_S = 20, 600.0
# On a GPU: few tiles a batch, so that all threads have a batch to read.
GPU_TILES, GPU_THREADS = 8, 16
PACK_TILES = 4


@contextmanager
def dense_run(
    source: str,
    *,
    app: str | None,
    accept_changed: bool = False,
    device: str,
    precision: str,
    threads: int | None,
    cores: int,
    cache: Path,
) -> Generator[DenseRun]:
    """Open the network that a command names.

    Args:
        source: A pack, a bundle, or the URL of a server.
        app: Its name on a server with several dense applications.
        accept_changed: Accept a bundle of an application whose sources changed.
        device: For a bundle: `"cpu"`, `"cuda"`, `"cuda:N"` or `"auto"`.
        precision: For a bundle on a GPU: `"fp32"`, `"bf16"` or `"fp16"`.
        threads: Threads that read and run; None for the source's own number.
        cores: CPU cores of this machine.
        cache: The folder of exported graphs.

    Raises:
        PackError: There is no pack or bundle, or its network is not dense.
        ApplicationError: The server has no such application.
    """
    if source.startswith(("http://", "https://")):
        from penstock.client.client import Client

        # Whole slides are background work; each request may wait for the others.
        with Client(
            source, latency_ms=LATENCY_MS, priority="background", retries=RETRIES, timeout_s=TIMEOUT_S
        ) as client:
            yield _server(client, source, app, threads or REQUESTS)
        return
    from penstock.core.bundles.bundle import MANIFEST

    folder = Path(source)
    if (folder / PACK_DESCRIPTION).is_file():
        yield _pack(folder, threads or cores)
    elif (folder / MANIFEST).is_file():
        from penstock.runtime.execution import Execution
        from penstock.runtime.executor_choice import resolved_device

        device = resolved_device(device, "auto")
        how = Execution(
            cache=cache,
            cores=cores,
            accept_changed=accept_changed,
            device=device,
            precision=precision,
            max_rows=GPU_TILES,
        )
        yield _bundle(folder, how, threads)
    else:
        raise PackError(f"{source} is no pack, bundle or URL; give one of them, such as RUN/bundle.")


def _server(client: Any, url: str, app: str | None, threads: int) -> DenseRun:
    served = {one["name"]: one for one in client.apps() if one.get("dense")}
    name = app or next(iter(served), "")
    if name not in served or (app is None and len(served) > 1):
        there = f"it has {', '.join(served)}; name one with --app" if served else "it has none"
        wanted = f"serves no dense application {name!r}" if app else "does not serve one dense application"
        raise ApplicationError(f"{url} {wanted}; {there}.")
    tile = TensorSpec.from_json(served[name]["input"])
    return DenseRun(
        dense=Dense.from_json(served[name]["dense"]),
        tile=tile,
        predict=lambda tiles_BTT3: client.predict(name, tiles_BTT3),
        run_tiles=max(1, REQUEST_BYTES // tile.nbytes),
        threads=threads,
    )


def _pack(folder: Path, threads: int) -> DenseRun:
    from penstock.core.packs.pack import read_pack
    from penstock.device.pack_engine import PackEngine

    pack = read_pack(pack_at(folder))
    dense, tile = _dense_of(pack.name, pack.dense, pack.input)
    engine = PackEngine(pack)

    def predict(tiles_BTT3: Array) -> Array:
        return np.stack([engine.run(tile_TT3)[0] for tile_TT3 in tiles_BTT3])

    # Each thread runs whole tiles on one core, which is faster than one tile on all cores.
    return DenseRun(dense=dense, tile=tile, predict=predict, run_tiles=PACK_TILES, threads=threads)


def _bundle(folder: Path, how: "Execution", threads: int | None) -> DenseRun:
    from penstock.runtime.executor import StepInput
    from penstock.runtime.executor_choice import make_runnable

    made = make_runnable(folder, how, lambda application: GPU_TILES)
    dense, tile = _dense_of(made.application.name, made.application.dense, made.application.input)
    rows, lock = min(GPU_TILES, made.executor.max_rows), threading.Lock()

    def predict(tiles_BTT3: Array) -> Array:
        count = len(tiles_BTT3)
        batch = StepInput(
            slots_B=np.arange(count),
            chunk_B=tiles_BTT3,
            length_B=np.ones(count, np.int64),
            fresh_B=np.ones(count, np.bool_),
        )
        with lock:
            return made.executor.step(batch).output_B.copy()

    predict(np.zeros((rows, *tile.shape), np.uint8))
    own = how.cores if how.device == "cpu" else GPU_THREADS
    return DenseRun(dense=dense, tile=tile, predict=predict, run_tiles=rows, threads=threads or own)


def _dense_of(name: str, dense: Dense | None, tile: ChunkSpec | Any) -> tuple[Dense, TensorSpec]:
    if dense is None:
        raise PackError(f"the network of {name!r} is not dense; give its application a `dense` and train it again.")
    assert isinstance(tile, TensorSpec), tile
    return dense, tile
