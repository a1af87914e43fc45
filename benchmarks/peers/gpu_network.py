"""The network that every peer serves on a GPU: bf16, channels last, compiled, a CUDA graph for each batch size.

python -m benchmarks.peers.gpu_network BUNDLE SIZE compiles one batch size, so that servers find it in torch's cache.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.load_weights import load_weights

SIZES = (1, 8, 32, 64, 128, 256)
WARM_RUNS = 3


@final
class GpuNetwork:
    """The network of a bundle over raw bytes, as an expert would write it by hand for one GPU.

    Args:
        bundle: The bundle's folder.
        device: `"cuda"`; `"cpu"` runs the plain network, to try a server without a GPU.
        sizes: Batch sizes that are captured; a batch is padded up to one of them.
    """

    def __init__(self, bundle: str | Path, device: str, sizes: Sequence[int] = SIZES) -> None:
        # Several workers share the cores with the server.
        torch.set_num_threads(1)
        files = read_bundle(Path(bundle))
        network = bundle_application(files).model().eval().requires_grad_(False)
        load_weights(network, files.weights)
        spec = files.manifest.input
        assert isinstance(spec, TensorSpec), spec
        self._row_nbytes = spec.nbytes
        on_gpu = device.startswith("cuda")
        shape, dtype = (max(sizes), *spec.shape), torch.from_numpy(np.empty(0, spec.numpy_dtype)).dtype
        # Page-locked, so that the copy engine reads it.
        self._host = torch.empty(shape, dtype=dtype, pin_memory=on_gpu)
        self._bytes = self._host.numpy().reshape(-1).view(np.uint8).data
        self._run = _captured(network, self._host, device, sizes) if on_gpu else _plain(network, self._host)

    def predict(self, bodies: Sequence[bytes | bytearray | memoryview]) -> Array:
        """One batch: the raw bytes of each input to the outputs, valid until the next batch."""
        for row, body in enumerate(bodies):
            self._bytes[row * self._row_nbytes : (row + 1) * self._row_nbytes] = body
        return self._run(len(bodies))

    def answer(self, bodies: Sequence[bytes | bytearray | memoryview]) -> list[bytes]:
        """One batch: the raw bytes of each input to the raw bytes of each output."""
        return [output.tobytes() for output in self.predict(bodies)]


def _plain(network: nn.Module, host: Tensor) -> Callable[[int], Array]:
    @torch.inference_mode()
    def run(rows: int) -> Array:
        return network(host[:rows]).numpy()

    return run


def _captured(network: Any, host: Tensor, device: str, sizes: Sequence[int]) -> Callable[[int], Array]:
    torch.backends.cudnn.benchmark = True
    network = network.to(device, torch.bfloat16)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(lambda given: network.raw(given).float(), dynamic=False)
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
    for size in sizes:
        given = torch.zeros((size, *host.shape[1:]), dtype=host.dtype, device=device)
        graphs[size] = _capture(compiled, given)
    answers = torch.empty((max(sizes), *graphs[max(sizes)][2].shape[1:]), pin_memory=True)

    @torch.inference_mode()
    def run(rows: int) -> Array:
        graph, given, output = graphs[min(size for size in sizes if size >= rows)]
        given[:rows].copy_(host[:rows], non_blocking=True)
        graph.replay()
        answers[:rows].copy_(output[:rows], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return answers[:rows].numpy()

    return run


@torch.inference_mode()
def _capture(compiled: Callable[[Tensor], Tensor], given: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_RUNS):
            compiled(given)
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compiled(given)
    return graph, given, output


if __name__ == "__main__":
    GpuNetwork(sys.argv[1], "cuda", [int(size) for size in sys.argv[2:]])
