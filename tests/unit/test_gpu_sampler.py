"""GPU utilization of a measurement, from a driver that is a script."""

import sys
import time
from pathlib import Path

import pytest

from penstock.bench.server_process import _GpuSampler


@pytest.mark.parametrize(
    ("lines", "share"),
    [
        # The second GPU is not used; the first is idle half of the time.
        (["0, 80", "1, 0", "0, 0", "1, 0"], 0.4),
        (["0, 0", "0, 0"], 0.0),
        (["0, [N/A]"], None),
    ],
)
def test_idle_samples_count_and_unused_gpus_do_not(
    lines: list[str], share: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable}\nimport pathlib, time\nprint({chr(10).join(lines)!r}, flush=True)\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sampler = _GpuSampler()
    while not ready.exists():
        time.sleep(0.01)
    assert sampler.busy_share() == (None if share is None else pytest.approx(share))
