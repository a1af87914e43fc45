"""What Triton's Python backend runs of live streams: a chunk of each sequence of a batch, their states kept here."""

import json
import sys
from pathlib import Path
from typing import Any, final

# The backend's interpreter is isolated and ignores PYTHONPATH; server.py wrote where its modules are.
sys.path.extend(Path(__file__).with_name("path.txt").read_text().splitlines())

import numpy as np
import triton_python_backend_utils as triton

from benchmarks.peers.bundle_network import StreamNetwork

START, END = 1, 2


@final
class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        slots = int(parameters["slots"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]
        self._network = StreamNetwork(parameters["bundle"], slots)
        # Of each sequence, the one that began first in front.
        self._slots: dict[int, int] = {}
        self._free = list(range(slots))

    def execute(self, requests: list[Any]) -> list[Any]:
        # By the direct strategy, a slot without a chunk comes as a request of no sequence.
        real = [request for request in requests if request.correlation_id()]
        answers = iter(self._answers(real))
        return [next(answers) if request.correlation_id() else triton.InferenceResponse([]) for request in requests]

    def _answers(self, requests: list[Any]) -> list[Any]:
        flags_B = np.array([request.flags() for request in requests])
        fresh_B, last_B = flags_B & START != 0, flags_B & END != 0
        ids = [request.correlation_id() for request in requests]
        slots_B = np.array([self._slot(name, fresh) for name, fresh in zip(ids, fresh_B, strict=True)])
        chunks = [triton.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        output_B, length_B = self._network.step(slots_B, np.concatenate(chunks), fresh_B, last_B)
        for row in last_B.nonzero()[0]:
            self._free.append(self._slots.pop(ids[row]))
        return [
            triton.InferenceResponse([triton.Tensor(self._output, output_B[row : row + 1, :length])])
            for row, length in enumerate(length_B.tolist())
        ]

    def _slot(self, sequence: int, fresh: bool) -> int:
        if not fresh:
            return self._slots[sequence]
        slot = self._slots.pop(sequence, None)
        if slot is None:
            # One that Triton ended by itself, because it was idle, left its slot behind.
            slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
        self._slots[sequence] = slot
        return slot
