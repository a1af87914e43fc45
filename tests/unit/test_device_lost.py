"""A GPU that failed: its process ends at once, so that another one takes its place."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import DeviceLost
from penstock.serve.engine.model_loader import DEVICE_LOST, ModelLoader


def test_the_process_of_a_failed_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick() -> None:
        raise DeviceLost("the GPU failed")

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    loader: Any = ModelLoader.__new__(ModelLoader)
    loader._multiplexer = SimpleNamespace(tick=tick)
    with pytest.raises(SystemExit) as left:
        loader.tick()
    assert left.value.code == DEVICE_LOST
