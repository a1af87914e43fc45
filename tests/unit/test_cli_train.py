"""The command `penstock train` says so if it leaves GPUs unused."""

from dataclasses import replace

import pytest
import torch

from penstock.cli.train import LaunchOptions, unused_gpus

OPTIONS = LaunchOptions(device="cpu", count=None, assignment=None, timeout_s=60)


@pytest.mark.parametrize(("changes", "gpus", "said"), [({}, 2, True), ({}, 0, False), ({"count": 1}, 2, False)])
def test_gpus_that_are_left_unused_are_named(
    changes: dict[str, int], gpus: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    notice = unused_gpus(replace(OPTIONS, **changes))
    assert (notice is not None) == said
    assert notice is None or "--gpus 2" in notice
