"""A GPU that failed: its process ends at once, so that another one takes its place."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import DeviceLost
from penstock.serve.engine_host import DEVICE_LOST
from penstock.serve.engine_process import EngineProcess
from penstock.serve.single import _Single


@pytest.mark.parametrize("kind", [EngineProcess, _Single])
def test_the_process_of_a_failed_gpu_ends(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tick() -> None:
        raise DeviceLost("the GPU failed")

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    process = kind.__new__(kind)
    process._host = SimpleNamespace(engines=SimpleNamespace(tick=tick))
    with pytest.raises(SystemExit) as left:
        process._work()
    assert left.value.code == DEVICE_LOST
