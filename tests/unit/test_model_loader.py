"""Engines that share a device, and loads that fail."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from penstock.core.errors import PenstockError
from penstock.serve.engine.model_loader import Engine, ModelLoader, engines_on
from penstock.serve.messages import LoadModel
from penstock.serve.settings import BatchSettings, ExecutionSettings, ModelSettings, Settings
from tests.support.serving import write_doubler


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (("cpu", "cpu"), [2, 2]),
        (("cuda:0", "cuda:1"), [1, 1]),
        (("cuda", "cuda:0", "cuda:1"), [2, 2, 1]),
        (("auto",), [1]),
    ],
)
def test_engines_on_one_device_are_counted_under_all_of_its_names(devices: tuple[str, ...], shared: list[int]) -> None:
    assert [engines_on(device, devices) for device in devices] == shared


@pytest.mark.parametrize("stage", ["measuring", "making the engine"])
def test_a_load_that_fails_keeps_no_memory_of_its_table(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A recorded traceback would hold the table.
    caplog.set_level("CRITICAL", "penstock.serve.engine.model_loader")
    if stage == "making the engine":
        monkeypatch.setattr(Engine, "__init__", lambda self, *_, **__: [][0])
    bundle = write_doubler(tmp_path)
    settings = Settings(
        models=ModelSettings(bundles=(bundle,)),
        batching=BatchSettings(latency_ms=1e-6),
        execution=ExecutionSettings(device="cpu", executor="torch", cache=tmp_path),
        frontends=1,
    )
    loader = ModelLoader(settings, lambda key, activity: None, shared=True)
    command = LoadModel(key=0, model=0, name="doubler", version="1", bundle=str(bundle))

    def tables() -> int:
        gc.collect()
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith("/memfd:penstock-slots") for link in links if link.is_symlink())

    before = tables()
    for _ in range(2):
        with pytest.raises(PenstockError):
            asyncio.run(loader.load(command))
    assert tables() == before
