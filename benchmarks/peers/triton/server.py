"""Triton Inference Server with its Python backend: writes a model repository and becomes the server."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.peers.bundle_network import peer_arguments
from benchmarks.peers.servers import HOME, ROOT
from penstock.core.bundles.bundle import read_bundle

HERE = Path(__file__).parent
# The stub is linked with the system's own Python of this version and finds its modules by it.
STUB_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Of the memory that a stub shares with the server; a batch of 256 pictures takes 38 MB.
SHARED_NBYTES = 256 << 20

CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
input {{ name: "input" data_type: TYPE_UINT8 dims: {input_dims} }}
output {{ name: "output" data_type: TYPE_FP32 dims: {output_dims} }}
instance_group {{ kind: KIND_CPU count: {workers} }}
dynamic_batching {{
  max_queue_delay_microseconds: {max_wait_us}
}}
parameters {{ key: "bundle" value {{ string_value: "{bundle}" }} }}
parameters {{ key: "device" value {{ string_value: "{device}" }} }}
"""


def main() -> None:
    given = peer_arguments()
    manifest = read_bundle(given.bundle).manifest
    config = CONFIG.format(
        name=manifest.name,
        max_batch=given.max_batch,
        input_dims=list(manifest.input.shape),
        output_dims=list(manifest.output.shape),
        max_wait_us=round(given.max_wait_ms * 1000),
        bundle=given.bundle.resolve(),
        workers=given.workers,
        device=given.device or "",
    )
    shared = [] if given.device is None else [f"--backend-config=python,shm-default-byte-size={SHARED_NBYTES}"]
    become_triton(
        repository_of(manifest.name, config, HERE / ("model.py" if given.device is None else "gpu_model.py")),
        "--http-address=127.0.0.1",
        f"--http-port={given.port}",
        f"--http-thread-count={given.http}",
        "--allow-grpc=false",
        *shared,
    )


def repository_of(name: str, config: str, model: Path) -> Path:
    """Write a repository of one model of the Python backend.

    Args:
        name: The model's.
        config: Its config.pbtxt.
        model: What the backend runs.
    """
    repository = HOME / "triton-repository"
    shutil.rmtree(repository, ignore_errors=True)
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copy(model, version / "model.py")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    modules_at = [str(ROOT), *filter(None, given), *(place for place in sys.path if place.endswith("site-packages"))]
    (version / "path.txt").write_text("\n".join(modules_at))
    (repository / name / "config.pbtxt").write_text(config)
    return repository


def become_triton(repository: Path, *options: str) -> NoReturn:
    """Let this process be the server from now on."""
    site = next(place for place in map(Path, sys.path) if (place / "pytriton").is_dir())
    triton = site / "pytriton" / "tritonserver"
    # As pytriton does it: the stub finds its libraries by its place in this tree.
    stub = triton / "python_backend_stubs" / STUB_PYTHON / "triton_python_backend_stub"
    shutil.copy(stub, triton / "backends" / "python")
    server = str(triton / "bin" / "tritonserver")
    places = f"--model-repository={repository}", f"--backend-directory={triton / 'backends'}"
    os.execv(server, [server, *places, "--allow-metrics=false", *options])


if __name__ == "__main__":
    main()
