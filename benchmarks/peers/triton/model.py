"""What Triton's Python backend runs: the requests of one batch, joined, through the network once."""

import json
import sys
from pathlib import Path
from typing import Any, final

# The backend's interpreter is isolated and ignores PYTHONPATH; server.py wrote where its modules are.
sys.path.extend(Path(__file__).with_name("path.txt").read_text().splitlines())

import numpy as np
import triton_python_backend_utils as triton

from benchmarks.peers.bundle_network import Network


@final
class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._network = Network(parameters["bundle"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        chunks = [triton.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        outputs = self._network.predict(np.concatenate(chunks))
        return [
            triton.InferenceResponse([triton.Tensor("output", outputs[row : row + 1])]) for row in range(len(requests))
        ]
