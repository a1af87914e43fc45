"""What Triton's Python backend runs on a GPU: the requests of one batch through the network compiled by hand."""

import json
import os
import sys
from pathlib import Path
from typing import Any, final

# The backend's interpreter is isolated and ignores PYTHONPATH; server.py wrote where its modules are.
sys.path.extend(Path(__file__).with_name("path.txt").read_text().splitlines())

# The embedded interpreter has no executable that could start compile workers.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import triton_python_backend_utils as triton

from benchmarks.peers.gpu_network import GpuNetwork


@final
class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._network = GpuNetwork(parameters["bundle"]["string_value"], parameters["device"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        # By DLPack, since the stub was compiled against NumPy 1.
        bodies = [
            memoryview(torch.from_dlpack(triton.get_input_tensor_by_name(request, "input").to_dlpack()).numpy().ravel())
            for request in requests
        ]
        outputs = torch.from_numpy(self._network.predict(bodies))
        return [
            triton.InferenceResponse([triton.Tensor.from_dlpack("output", outputs[row : row + 1])])
            for row in range(len(requests))
        ]
