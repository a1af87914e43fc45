"""Triton Inference Server with its Python backend: writes a model repository and becomes the server."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.peers.bundle_network import peer_arguments
from benchmarks.peers.servers import ROOT
from penstock.core.bundle import read_bundle

HERE = Path(__file__).parent
# The stub is linked with the system's own Python 3.11 and finds its modules by this version.
STUB_PYTHON = "3.11"
HTTP_THREADS = 2

CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
input {{ name: "input" data_type: TYPE_UINT8 dims: {input_dims} }}
output {{ name: "output" data_type: TYPE_FP32 dims: {output_dims} }}
instance_group {{ kind: KIND_CPU count: 1 }}
dynamic_batching {{
  max_queue_delay_microseconds: {max_wait_us}
}}
parameters {{ key: "bundle" value {{ string_value: "{bundle}" }} }}
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
    )
    become_triton(
        repository_of(manifest.name, config, HERE / "model.py"),
        "--http-address=127.0.0.1",
        f"--http-port={given.port}",
        f"--http-thread-count={HTTP_THREADS}",
        "--allow-grpc=false",
    )


def repository_of(name: str, config: str, model: Path) -> Path:
    """Write a repository of one model of the Python backend.

    Args:
        name: The model's.
        config: Its config.pbtxt.
        model: What the backend runs.
    """
    repository = Path(sys.prefix) / "repository"
    shutil.rmtree(repository, ignore_errors=True)
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copy(model, version / "model.py")
    modules_at = [str(ROOT), *(place for place in sys.path if place.endswith("site-packages"))]
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
