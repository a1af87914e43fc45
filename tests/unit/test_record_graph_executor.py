"""CUDA graphs by rows and length, without a GPU: what happens where a shape cannot be captured."""

import logging
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.spec import TensorSpec
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import CAPTURE_EVERY_S, USES
from penstock.runtime.gpu.record_graph_executor import RecordGraphExecutor

ON_GPU = ("Stream", "current_stream", "device", "empty_cache", "reset_peak_memory_stats", "stream")
BATCH = np.array([[3.0, 5.0], [1.0, 2.0]], np.float32)


class NoZeros(nn.Module):
    """A network that raises on zeros, as one does that picks the first token that is no padding."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.trials = error, 0

    def forward(self, chunk_B: Tensor) -> Tensor:
        if not chunk_B.any():
            self.trials += 1
            raise self.error
        return chunk_B * 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no token here."), "zeros: RuntimeError: no token here)"),
        (ValueError("empty"), "zeros: ValueError: empty)"),
        (torch.cuda.OutOfMemoryError("5 GB"), "the memory of the GPU does not suffice)"),
    ],
)
def test_requests_are_answered_where_the_trial_of_their_shape_fails_and_it_is_tried_and_said_once(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ON_GPU:
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    seconds = iter(range(100))
    network = NoZeros(error)
    spec = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers")
    executor = RecordGraphExecutor(
        GpuNetwork(network, spec, spec, "fp32"),
        spec,
        spec,
        max_rows=4,
        device="cpu",
        limit_bytes=1 << 30,
        clock_s=lambda: next(seconds) * 2 * CAPTURE_EVERY_S,
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * USES):
            np.testing.assert_array_equal(executor.predict(BATCH), BATCH * 2)
    assert network.trials == 1
    assert executor.uncaptured_batches == 3 * USES
    [said] = caplog.messages
    assert said.startswith("batches of rows 2")
    assert said.endswith(reason)
